"""Keys of a Hugging Face config.json that change nothing that a decoder computes, and keys that must be off.

Any other key that `model.families` does not read is an error: it may change the function, as `is_causal` does. The keys
are those of transformers 4 and 5, of the checkpoints of the LLaMA, Mistral, Qwen and StableLM families, and of the
tools that save them. Imports no torch.
"""

from collections.abc import Iterable

from errors import UserError

HARMLESS = frozenset(
    """
    model_type architectures transformers_version name_or_path _name_or_path _commit_hash tokenizer_class prefix
    model_name unsloth_fixed unsloth_version is_llama_config transformers.js_config

    dtype torch_dtype use_bfloat16 pretraining_tp attn_implementation _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation_internal experts_implementation _flash_attn_2_enabled
    use_flash_attn use_flash_attention flash_attn use_sdpa torchscript tf_legacy_loss chunk_size_feed_forward

    attention_dropout hidden_dropout classifier_dropout attn_pdrop resid_pdrop embd_pdrop dropout neftune_noise_alpha
    gradient_checkpointing use_reentrant_checkpointing

    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id eod_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id

    max_sequence_length max_seq_len max_seq_length seq_length model_max_length tokenizer_model_max_length
    tokenizer_padding_side

    id2label label2id num_labels problem_type finetuning_task task_specific_params is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder

    use_cache cache_implementation return_dict use_return_dict output_hidden_states output_attentions
    return_dict_in_generate output_scores num_logits_to_keep

    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind
    """.split()
)

QUANTIZED = ("quantization_config", "quantization", "compression_config")
# Keys of functions that this decoder does not compute, with the values under which they change nothing.
OFF: dict[str, tuple] = {
    "is_causal": (True,),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "pruned_heads": ({}, [], None),
    "per_layer_config": ({}, None),
    **dict.fromkeys([*QUANTIZED, "attention_chunk_size"], (None,)),
    **dict.fromkeys(
        """
        mlp_bias use_parallel_residual qk_layernorm qk_norm use_qk_norm qk_layer_norms rope_interleaved use_mrope
        is_encoder_decoder use_bidirectional_attention alibi use_moe use_bias bias final_logit_softcapping
        attn_logit_softcapping
        """.split(),
        (False, None),
    ),
}


def check_keys(fields: dict, read: Iterable[str]) -> None:
    """Raise `UserError` for keys that may change the function; `read` are those that the caller takes into account."""
    for key, allowed in OFF.items():
        if key in fields and key not in read and fields[key] not in allowed:
            advice = "give the unquantized model" if key in QUANTIZED else f"it needs {allowed[0]!r}"
            raise UserError(f"{key} is {fields[key]!r}, which this decoder cannot represent; {advice}.")
    code = fields.get("auto_map") or {}
    if not isinstance(code, dict) or code.keys() & {"AutoModel", "AutoModelForCausalLM"}:
        raise UserError(
            "auto_map names code of the checkpoint's own, which is never run; remove it if model_type says the same."
        )
    unknown = [
        key for key in fields if key not in HARMLESS and key not in OFF and key not in read and key != "auto_map"
    ]
    if unknown:
        keys = ", ".join(unknown)
        raise UserError(f"unknown keys that may change what the model computes: {keys}; remove those that do not.")

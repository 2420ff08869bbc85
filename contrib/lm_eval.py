"""lm-eval (EleutherAI's lm-evaluation-harness) with any model of this project; its arguments are lm-eval's own:

    python -m contrib.lm_eval --model prenorm --model_args pretrained=runs/NAME --tasks hellaswag --batch_size 16

This is for models that `transformers` cannot open. With others, `lm_eval --model hf` generates faster.
"""

import sys

if __name__ == "__main__":  # a missing package is one line, too
    from errors import exit_on_user_error

    with exit_on_user_error():
        from contrib.lm_eval import cli_evaluate

        sys.exit(cli_evaluate())

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from errors import note
from generation.load import load_decoder, open_model
from model.decoder import Decoder


class DecoderForTransformers(PreTrainedModel, GenerationMixin):
    """A decoder with the methods of a model of transformers. It generates without a key/value cache."""

    config_class = PreTrainedConfig
    _is_stateful = True  # so that `generate` does not expect a cache

    def __init__(self, decoder: Decoder):
        fields = ("vocab_size", "num_hidden_layers", "max_position_embeddings")
        super().__init__(PreTrainedConfig(**{name: getattr(decoder.config, name) for name in fields}))
        self.decoder = decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> CausalLMOutput:
        """Logits (B, T, V). attention_mask (B, T): 0 where a sequence is padded on the left."""
        padding = None if attention_mask is None else (attention_mask == 0).sum(-1)
        return CausalLMOutput(logits=self.decoder(input_ids, padding=padding))

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> dict:
        """All tokens so far, in every step."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}


@register_model("prenorm")
class Prenorm(HFLM):
    """`pretrained` is a run folder, a checkpoint or an adapter; `dtype` and `device` are as for generate.py."""

    def __init__(self, pretrained: str, device: str = "auto", dtype: str = "auto", **options):
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "auto"  # lm-eval's command line asks for cuda:0 where its user asked for nothing
            note("there is no CUDA device; computing on the CPU")
        checkpoint, tokenizer, _ = open_model(pretrained)
        decoder = DecoderForTransformers(load_decoder(checkpoint, device, dtype))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer.folder)
        super().__init__(decoder, tokenizer=tokenizer, backend="causal", **options)

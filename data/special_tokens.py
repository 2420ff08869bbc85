"""The added tokens of a tokenizer, special ones, BOS and EOS among them, as the JSON files of its folder list them."""

from tokenizers import AddedToken, Tokenizer

from errors import note

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("special", "lstrip", "rstrip", "single_word")
# Those of conversations, in tokenizers that are trained here; no text gives them.
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def add_tokens(
    tokenizer: Tokenizer, config: dict, old_names: dict, old_ids: dict[str, int]
) -> tuple[dict, dict[str, str]]:
    """Add the tokens that only tokenizer_config.json has or, in old folders, special_tokens_map.json (`old_names`) and
    added_tokens.json (`old_ids`), with the next free ids, as in transformers. Returns the configuration with all added
    tokens, and the texts of those that have a name, such as eos_token.
    """
    present = {i: token.__getstate__() for i, token in tokenizer.get_added_tokens_decoder().items()}
    listed = config.get("added_tokens_decoder")
    if listed is None:
        listed = {i: {"content": text} for text, i in old_ids.items()} | present
    else:
        old_names = {}
    tokens = {token["content"]: token for token in present.values()}
    tokens |= {listed[i]["content"]: listed[i] for i in sorted(listed, key=int)}

    fields = dict.fromkeys(NAMED) | config | old_names
    named = {name: as_dict(token) for name, token in fields.items() if name.endswith("_token")}
    unnamed = config.get("extra_special_tokens") or {}
    if isinstance(unnamed, dict):
        named |= {name: as_dict(token) for name, token in unnamed.items()}
        unnamed = (old_names | config).get("additional_special_tokens") or []
    for token in filter(None, [*named.values(), *map(as_dict, unnamed)]):
        text = token["content"]
        tokens[text] = token | tokens.get(text, {}) | {"special": True}
    flags = {text: {flag: token.get(flag, False) for flag in FLAGS} for text, token in tokens.items()}
    # Text that a normalizer turns into a token, such as the same in capitals, is no token.
    others = [text for text, token in tokens.items() if token.get("normalized") and not token.get("special")]
    if others and tokenizer.normalizer is not None:
        note(f"{', '.join(others)}: found before a text is normalized; ids beside them may differ from transformers'")
    tokenizer.add_tokens([AddedToken(text, normalized=False, **flags[text]) for text in tokens])

    texts = {name: token["content"] for name, token in named.items() if token}
    added = {i: token.__getstate__() for i, token in tokenizer.get_added_tokens_decoder().items()}
    if added != present or len(config.get("added_tokens_decoder", added)) < len(added):
        config = config | texts | {"added_tokens_decoder": added}
    return config, texts


def as_dict(token: object) -> dict:
    """A token that may be given as its text; empty if it is none."""
    if isinstance(token, str):
        return {"content": token}
    return token if isinstance(token, dict) else {}


def find_bos(tokenizer: Tokenizer, config: dict, bos: str | None) -> int | None:
    """The id of BOS: from the configuration or, if it does not say, what the post-processor puts before a text."""
    if "add_bos_token" in config:
        return tokenizer.token_to_id(bos) if config["add_bos_token"] and bos is not None else None
    plain, full = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    return full[0] if full[:1] != plain[:1] else None


def find_eos(tokenizer: Tokenizer, eos: str | None, generation_config: dict) -> int:
    """The id of EOS: from the configuration, or the first of generation_config.json."""
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    if eos_id is None:
        eos_id = generation_config.get("eos_token_id")
    if isinstance(eos_id, list):
        eos_id = eos_id[0]
    if eos_id is None:
        raise ValueError('it names no "eos_token" of the tokenizer')
    return eos_id

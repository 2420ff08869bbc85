"""The tokens beside a tokenizer's vocabulary, special ones and others, as the JSON files of a folder list them."""

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("special", "lstrip", "rstrip", "single_word")


def read_added_tokens(
    config: dict, old_names: dict, old_ids: dict[str, int], known: dict[int, dict]
) -> tuple[dict[str, dict], dict[str, str]]:
    """The flags of all added tokens by their text, those that are `known` first; the text of special ones by name.

    config: tokenizer_config.json; old_names, old_ids: special_tokens_map.json and added_tokens.json, of old folders.
    """
    listed = config.get("added_tokens_decoder")
    if listed is None:
        listed = {i: {"content": text} for text, i in old_ids.items()} | known
    else:
        old_names = {}
    tokens = {token["content"]: token for token in known.values()}
    tokens |= {listed[i]["content"]: listed[i] for i in sorted(listed, key=int)}

    fields = dict.fromkeys(NAMED) | config | old_names
    named = {name: as_dict(token) for name, token in fields.items() if name.endswith("_token")}
    others = config.get("extra_special_tokens") or {}
    if isinstance(others, dict):
        named |= {name: as_dict(token) for name, token in others.items()}
        others = (old_names | config).get("additional_special_tokens") or []
    for token in filter(None, [*named.values(), *map(as_dict, others)]):
        text = token["content"]
        tokens[text] = token | tokens.get(text, {}) | {"special": True}
    flags = {text: {flag: token.get(flag, False) for flag in FLAGS} for text, token in tokens.items()}
    return flags, {name: token["content"] for name, token in named.items() if token}


def as_dict(token: object) -> dict:
    """A token that may be given as its text; empty if it is none."""
    if isinstance(token, str):
        return {"content": token}
    return token if isinstance(token, dict) else {}

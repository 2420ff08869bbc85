"""Where a checkpoint keeps its chat template."""

from pathlib import Path

from errors import read_json, reading


def read_template(checkpoint: Path) -> str | None:
    """The source of the chat template, None if there is none: chat_template.jinja, or a field of tokenizer_config.json.

    A model may have several; the others are for tools and documents. Old models have chat_template.json.
    """
    for name in ("chat_template.jinja", "chat_templates/default.jinja"):
        if (path := checkpoint / name).is_file():
            with reading(path):
                return path.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(checkpoint / name).get("chat_template")
        if template is not None:
            with reading(checkpoint / name):
                return (
                    template if isinstance(template, str) else {t["name"]: t["template"] for t in template}["default"]
                )
    return None

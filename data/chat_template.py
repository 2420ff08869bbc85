"""Where a checkpoint keeps its chat template."""

import json
from pathlib import Path

from errors import UserError, read_json


def read_template(checkpoint: Path) -> str | None:
    """The source of the chat template, None if there is none: chat_template.jinja, or a field of tokenizer_config.json.

    A model may have several; the others are for tools and documents. Old models have chat_template.json. Raises
    `UserError` for what is no text.
    """
    for name in ("chat_template.jinja", "chat_templates/default.jinja"):
        if (path := checkpoint / name).is_file():
            try:
                return path.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is not UTF-8 ({error}); download it again.") from None
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(path := checkpoint / name).get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
            named = {str(entry.get("name")): entry.get("template") for entry in template}
            template = named.get("default") or named
        if isinstance(template, str):
            return template
        if template is not None:
            raise UserError(
                f"the chat_template in {path} is {json.dumps(template)[:80]}, which is neither a text nor a list with "
                f"one named default; download the file again."
            )
    return None

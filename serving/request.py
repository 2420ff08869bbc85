"""The body of a request -> `Request`. What is wrong in it is a `Refused`, which becomes a 4xx in OpenAI's format."""

import json
import secrets

from errors import UserError, reading
from generation.prompts import encode_prompt, first_tokens
from generation.settings import Sampling


class Refused(UserError):
    """An answer that is an error: its HTTP status, a line, and what OpenAI's format calls the code."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status, self.body = status, {"message": str(self), "type": kind, "param": None, "code": code}


def parse(content: bytes, chat: bool, models: dict) -> "Request":
    try:
        with reading("the request", "see OpenAI's reference of the API"):
            return Request(json.loads(content), chat, models)
    except Refused:
        raise
    except UserError as error:
        raise Refused(400, str(error)) from None


class Request:
    """What is to be generated: `samples` answers to the ids `prompt`, or with `score` the prompt's own logprobs."""

    def __init__(self, body: dict, chat: bool, models: dict):
        def get(name, default, low=0, high=1 << 31, kinds=()):
            """A field of the body, the default if it is absent or null."""
            value = default if body.get(name) is None else body[name]
            kinds = kinds or ((int, float) if type(default) is float else type(default))
            if value is not default and (not isinstance(value, kinds) or (type(value) is bool and kinds is not bool)):
                raise ValueError(f"{name} has a wrong type")
            if isinstance(value, int | float) and not low <= value <= high:
                raise ValueError(f"{name} is {value} but must be from {low} to {high}")
            return value

        if (name := get("model", next(iter(models)))) not in models:
            raise Refused(404, f"there is no model {name!r}; there are: {', '.join(models)}", "model_not_found")
        self.model, self.chat, self.stream = models[name], chat, get("stream", False)
        self.stream_usage = bool(get("stream_options", {}).get("include_usage"))
        self.samples, self.seed = get("n", 1, 1, 16), get("seed", secrets.randbelow(1 << 31), -(1 << 63), 1 << 63)
        self.max_tokens = get("max_completion_tokens", get("max_tokens", 2048 if chat else 200))
        self.score = get("echo", False)  # how OpenAI's completions return the logprobs of a text
        if self.score != (self.max_tokens == 0) or (self.score and (chat or self.stream)):
            raise ValueError("max_tokens 0 and echo need each other, and neither a chat nor a stream")
        top = get("top_logprobs" if chat else "logprobs", None, 0, 20, int)
        self.top_logprobs = (None, top or 0)[get("logprobs", False)] if chat else top  # None: no logprobs at all
        default = self.model.sampling if chat else Sampling()
        self.sampling = Sampling(**{key: get(key, value, -1e9, 1 << 31) for key, value in vars(default).items()})
        stop = get("stop", [], kinds=(str, list))
        self.stop = [text for text in ([stop] if isinstance(stop, str) else stop) if text.encode()]
        tokenizer, self.first = self.model.tokenizer, None
        if chat:
            if self.model.chat is None:
                raise Refused(400, f"{name} has no chat template: it only continues texts", "no_chat_template")
            self.prompt = self.model.chat.encode([message(fields) for fields in body["messages"]])
        elif isinstance(prompt := get("prompt", "", kinds=(str, list)), str):
            prompt.encode()  # fails for half a surrogate pair
            self.prompt, self.first = encode_prompt(tokenizer, prompt), first_tokens(tokenizer, prompt)
            if self.score:
                self.prompt = [tokenizer.bos_id] * (tokenizer.bos_id is not None) + tokenizer.encode(prompt)
        else:
            self.prompt = prompt
        self.begin = get("begin_ids", [])  # the ids with which each answer begins; they are not sent again
        self.prompt = [*self.prompt, *self.begin]
        if not self.prompt or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in self.prompt):
            raise ValueError("a prompt is one text, or a list of token ids")
        if (length := len(self.prompt)) >= self.model.context + self.score:
            text = f"the prompt has {length} tokens, but the model's context is {self.model.context} tokens"
            raise Refused(400, text, "context_length_exceeded")


def message(fields: dict) -> dict[str, str]:
    """A message of a chat, its parts joined; only text is supported."""
    role, content = {"developer": "system"}.get(fields["role"], fields["role"]), fields["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"role {role!r} is not supported")
    text.encode()  # fails for half a surrogate pair
    return {"role": role, "content": text}

"""A request in OpenAI's format, and its answer by a loaded model, token by token in the worker's thread."""

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch

from data.chat import ChatFormat
from generation.generate import PrefixCache, generate
from generation.prompts import check_prompts, encode_prompt, first_tokens
from generation.session import load_decoder, open_directory
from generation.settings import Sampling, Settings, recommended_sampling
from generation.stream import TextStream


class ServedModel:
    """A checkpoint with its tokenizer, its chat template if it has one, and the keys and values of its last chat."""

    def __init__(self, name: str, directory: Path, settings: Settings):
        checkpoint, self.tokenizer, self.eos_ids = open_directory(directory)
        self.decoder, self._prefix = load_decoder(checkpoint, settings), PrefixCache()
        self.sampling = recommended_sampling(directory) or Sampling()  # of chats
        self.context, self._anchor = checkpoint.config.max_position_embeddings, self.tokenizer.encode("a")
        self.vocab_size = min(self.tokenizer.vocab_size, checkpoint.config.vocab_size)
        self.card = {"id": name, "object": "model", "owned_by": "prenorm", "sampling": vars(self.sampling)}
        self.card |= {"created": 0, "chat": bool(self.tokenizer.chat_template), "tokenizer": self.tokenizer.hash}

    @torch.inference_mode()
    def answer(self, request: "Request", emit: Callable[[int, str, dict | None, str | None], object]) -> dict:
        """Emit (sample, text, token with its logprob, finish reason) for each token and each end; return the usage."""
        prompt, samples, logprobs, new = request.prompt, request.samples, [], 0
        streams = [TextStream(self.tokenizer, request.stop, request.before) for _ in range(samples)]
        reuse = request.chat and samples == 1  # a completion is computed exactly as generate.py does
        self._prefix = self._prefix if reuse else PrefixCache()

        def on_logits(logits: torch.Tensor) -> None:
            if request.top_logprobs is not None:
                logprobs[:] = logits.log_softmax(-1)

        def on_token(i: int, token: int) -> bool:
            emit(i, streams[i].push(token), self._describe(logprobs[i], token, request) if logprobs else None, None)
            return streams[i].stopped

        def on_finish(i: int, reason: str) -> None:
            emit(i, streams[i].flush(), None, "stop" if reason in ("eos", "stop") else "length")

        if request.score:  # as if the model had chosen the tokens of the prompt
            ids = torch.tensor([prompt], device=self.decoder.embed_tokens.weight.device)
            for token, logits in zip(prompt[1:], self.decoder(ids)[0, :, : self.tokenizer.vocab_size], strict=False):
                on_logits(logits[None])
                on_token(0, token)
            on_finish(0, "length")
        else:
            options = dict(on_logits=on_logits, on_token=on_token, on_finish=on_finish, **request.options)
            options |= dict(vocab_size=self.tokenizer.vocab_size, prefix=self._prefix if reuse else None)
            ends = self.eos_ids | ({request.chat.end_of_turn} - {None} if request.chat else set())
            new = sum(map(len, generate(self.decoder, [prompt] * samples, eos_ids=ends, **options).tokens))
        return {"prompt_tokens": len(prompt), "completion_tokens": new, "total_tokens": len(prompt) + new}

    def _describe(self, logprobs: torch.Tensor, token: int, request: "Request") -> dict:
        """A token in OpenAI's format, and its id; `top_logprobs` has the most likely ones in its place."""
        ids = [token, *logprobs.topk(min(request.top_logprobs, len(logprobs))).indices.tolist()]
        texts = [self.tokenizer.decode([*self._anchor, i], special=True)[len("a") :] for i in ids]
        entries = [{"token": text, "id": i, "logprob": float(logprobs[i])} for i, text in zip(ids, texts, strict=True)]
        return entries[0] | {"bytes": None, "top_logprobs": entries[1:]}


class Request:
    """What a body asks for. A malformed body raises any exception, which `errors.reading` turns into one line."""

    def __init__(self, content: bytes, chat: bool, models: dict[str, ServedModel]):
        body = {name: value for name, value in json.loads(content).items() if value is not None}

        def get(name: str, default, kinds: list[type], low: int = 0, high: int = 1 << 31):
            value = body.get(name, default)
            if name in body and (type(value) not in kinds or (type(value) is int and not low <= value <= high)):
                raise ValueError(f"{name} must be of type {kinds[0].__name__}, and an int from {low} to {high}")
            return value

        self.model = models[get("model", next(iter(models)), [str])]
        self.samples, self.stream = get("n", 1, [int], 1, 16), get("stream", False, [bool])
        self.stream_usage = get("stream_options", {}, [dict]).get("include_usage")
        stop, tokenizer = get("stop", [], [str, list]), self.model.tokenizer
        self.stop = [text for text in ([stop] if isinstance(stop, str) else stop) if str.encode(text)]
        top = get("top_logprobs" if chat else "logprobs", None, [int], 0, 20)
        self.top_logprobs = top if not chat else (top or 0) if get("logprobs", False, [bool]) else None
        self.score = not chat and get("echo", False, [bool])  # how OpenAI's completions return the logprobs of a text
        limits = (0, 0) if self.score else (1, 1 << 31)
        limit = get("max_tokens", 2048 if chat else 200, [int], *limits)
        defaults = vars(self.model.sampling if chat else Sampling())
        sampling = Sampling(**{key: get(key, value, [type(value), int]) for key, value in defaults.items()})

        prompt, begin, first = get("prompt", "", [str, list]), get("begin_ids", [], [list]), None
        self.chat = ChatFormat(tokenizer) if chat else None
        if chat:
            prompt = self.chat.encode(body["messages"])
        elif self.score:
            prompt = [tokenizer.document_start, *(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)]
        elif isinstance(prompt, str):
            prompt, first = encode_prompt(tokenizer, prompt), None if begin else first_tokens(tokenizer, prompt)
        self.prompt = [*prompt, *begin]  # the answer begins with the ids `begin`, which are not sent again
        self.before = begin if chat else [] if self.score else self.prompt  # what the text of an answer continues
        if not self.prompt or not all(type(i) is int and 0 <= i < self.model.vocab_size for i in self.prompt):
            raise ValueError("a prompt is one text, or a list of token ids that the model has")
        check_prompts([self.prompt], min(self.model.context, 2048) if self.score else self.model.context)
        self.options = dict(max_new_tokens=get("max_completion_tokens", limit, [int], *limits), sampling=sampling)
        self.options |= dict(sample_numbers=range(self.samples), first_tokens=[first] * self.samples)
        self.options |= dict(seed=get("seed", secrets.randbelow(1 << 31), [int], -(1 << 63), (1 << 63) - 1))
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"

    def body(self, steps: list[tuple], usage: dict | None = None) -> str:
        """An answer, or a chunk of one, from what `ServedModel.answer` emitted."""
        choices = [self._choice(i, [step for step in steps if step[0] == i]) for i in sorted({s[0] for s in steps})]
        kind = "chat.completion" + ".chunk" * self.stream if self.chat else "text_completion"
        body = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model.card["id"]}
        return json.dumps(body | {"choices": choices} | ({"usage": usage} if usage else {}))

    def _choice(self, sample: int, steps: list[tuple]) -> dict:
        text, tokens = "".join(step[1] for step in steps), [step[2] for step in steps if step[2]]
        choice = {"index": sample, "finish_reason": steps[-1][3], "logprobs": {"content": tokens} if tokens else None}
        if self.chat:
            return choice | {"delta" if self.stream else "message": {"role": "assistant", "content": text}}
        if tokens:
            top = [{other["token"]: other["logprob"] for other in token["top_logprobs"]} for token in tokens]
            names, logprobs = [token["token"] for token in tokens], [token["logprob"] for token in tokens]
            choice["logprobs"] |= {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top}
        return choice | {"text": text}

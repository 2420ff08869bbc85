"""A request in OpenAI's format, and its answer by a loaded model, token by token in the worker's thread."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from data.chat import ChatFormat
from errors import UserError
from files import read_json, read_toml
from generation.generate import PrefixCache, generate
from generation.prompts import check_prompts, encode_prompt, first_tokens
from generation.session import load_decoder, open_directory
from generation.settings import Sampling, Settings, recommended_sampling
from generation.stream import TextStream
from model.cache import KeyValueCache
from model.count import num_parameters
from model.device import explain_out_of_memory

MAX_CHOICES = 128  # of one request
SCORED_AT_ONCE = 256  # tokens of a prompt: the logits of a long one would take gigabytes
Likeliest = Annotated[int, Meta(ge=0, le=20)]


class ServedModel:
    """A checkpoint with its tokenizer, its chat template if it has one, and the keys and values of its last chat."""

    def __init__(self, name: str, directory: Path, settings: Settings):
        checkpoint, self.tokenizer, self.eos_ids = open_directory(directory)
        self.decoder, self._prefix = load_decoder(checkpoint, settings), PrefixCache()
        self.sampling = recommended_sampling(directory) or Sampling()  # of chats
        self.vocab_size = min(self.tokenizer.vocab_size, checkpoint.config.vocab_size)
        self.card = {"id": name, "object": "model", "owned_by": "prenorm", "sampling": vars(self.sampling)}
        self.card |= {"created": 0, "chat": bool(self.tokenizer.chat_template), "tokenizer": self.tokenizer.hash}
        config, state, run = checkpoint.config, read_json(directory / "state.json"), directory.parent / "settings.toml"
        self.card |= {"norm": config.norm, "placement": config.norm_placement, "parameters": num_parameters(config)}
        self.card |= {"context": config.max_position_embeddings, "validation_loss": state.get("best_validation_loss")}
        prompts = read_toml(run).get("run", {}).get("sample_prompts", ()) if run.exists() else ()
        self.card["examples"] = [*filter(None, prompts)]

    @explain_out_of_memory("out of memory; send a shorter prompt, or ask for fewer samples.")
    @torch.inference_mode()
    def answer(self, request: "Request", emit: Callable[[int, str, list[dict], str | None], object]) -> dict:
        """Emit (choice, text, tokens with logprobs, finish reason) for each step, and return the usage.

        What is wrong with a prompt is raised before the first step. A choice begins with a step without tokens.
        """
        prompts, ends = self._encode(request)
        chat, n, top = request.chat, request.n, request.top
        start, new, streams, logprobs = 0, 0, [], []

        def on_logits(logits: torch.Tensor) -> None:
            if top is not None:
                logprobs[:] = logits.log_softmax(-1)

        def on_token(i: int, token: int) -> bool:
            described = [self._describe(token, logprobs[i], top)] if logprobs else []
            emit(start + i, streams[i].push(token), described, None)
            return streams[i].stopped

        def on_finish(i: int, reason: str) -> None:
            emit(start + i, streams[i].flush(), [], "stop" if reason in ("eos", "stop") else "length")

        options = dict(on_logits=on_logits, on_token=on_token, on_finish=on_finish, sampling=request.sampling)
        options |= dict(max_new_tokens=request.max_tokens, seed=request.seed, sample_numbers=range(n), eos_ids=ends)
        for start, (ids, first) in zip(range(0, n * len(prompts), n), prompts, strict=True):
            streams = [TextStream(self.tokenizer, request.stop, request.begin_ids if chat else ids) for _ in range(n)]
            for i in range(n):
                emit(start + i, streams[i].prompt if request.echo else "", [], None)
            if not chat or n > 1:  # a completion is computed exactly as generate.py does
                self._prefix = PrefixCache()
            for token, row in self._score(ids) if request.echo and top is not None else ():
                described = [self._describe(token, row, top)]
                for i in range(n):
                    emit(start + i, "", described, None)
            if request.max_tokens:
                options |= dict(first_tokens=[first] * n, prefix=self._prefix if n == 1 else None)
                result = generate(self.decoder, [ids] * n, vocab_size=self.vocab_size, **options)
                new += sum(map(len, result.tokens))
            else:
                for i in range(n):
                    on_finish(i, "length")
        old = sum(len(ids) for ids, _ in prompts)
        return {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}

    def _encode(self, request: "Request") -> tuple[list[tuple[list[int], list[int] | None]], frozenset[int]]:
        """The ids of each prompt with those that may follow it (None: any); and the ids that end an answer."""
        tokenizer, prompts, encoded, ends = self.tokenizer, request.prompt, [], self.eos_ids
        if request.chat:
            chat = ChatFormat(tokenizer)
            prompts, ends = [chat.encode(request.messages)], ends | chat.ends
        for prompt in prompts:
            ids, first = prompt, None
            if isinstance(prompt, str) and request.max_tokens:
                ids, first = encode_prompt(tokenizer, prompt), first_tokens(tokenizer, prompt)
            elif isinstance(prompt, str):  # only scored: from the token that begins a document to the last space
                ids = [tokenizer.document_start, *tokenizer.encode(prompt)]
            encoded.append(([*ids, *request.begin_ids], None if request.begin_ids else first))
        if not all(ids and min(ids) >= 0 and max(ids) < self.vocab_size for ids, _ in encoded):
            raise UserError(f"a prompt must be a text, or token ids from 0 to {self.vocab_size - 1}.")
        check_prompts([ids for ids, _ in encoded], self.decoder.config.max_position_embeddings)
        return encoded, ends

    def _score(self, ids: list[int]) -> Iterator[tuple[int, torch.Tensor | None]]:
        """The tokens of a prompt with the logprobs (V,) in their places, None in the first one's."""
        yield ids[0], None
        weight = self.decoder.embed_tokens.weight
        cache = KeyValueCache(self.decoder.config, 1, len(ids), device=weight.device, dtype=self.decoder.compute_dtype)
        for start in range(0, len(ids), SCORED_AT_ONCE):
            part = torch.tensor([ids[start : start + SCORED_AT_ONCE]], device=weight.device)
            logits = self.decoder(part, cache=cache)[0, :, : self.vocab_size]
            yield from zip(ids[start + 1 :], logits.log_softmax(-1), strict=False)
        self._prefix = PrefixCache(ids, cache)

    def _describe(self, token: int, logprobs: torch.Tensor | None, top: int) -> dict:
        """A token in OpenAI's format, and its id; `top_logprobs` has the most likely ones in its place."""

        def entry(i: int) -> dict:
            text, logprob = self.tokenizer.token_bytes(i), None if logprobs is None else float(logprobs[i])
            return {"token": text.decode("utf-8", "backslashreplace"), "id": i, "bytes": [*text], "logprob": logprob}

        likely = [] if logprobs is None else logprobs.topk(min(top, len(logprobs))).indices.tolist()
        return entry(token) | {"top_logprobs": [*map(entry, likely)]}


class Request(msgspec.Struct, dict=True):
    """What a body asks for, in OpenAI's names. msgspec checks types and ranges, and ignores other fields."""

    chat: bool
    sampling: Sampling
    model: str
    messages: list[dict] = []
    prompt: str | list[str | int | list[int]] = ""
    begin_ids: list[int] = []  # not OpenAI's: the answer begins with them, and they are not sent again
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    max_tokens: Annotated[int, Meta(ge=0)] = 200
    stop: str | list[str] = []
    seed: int = msgspec.field(default_factory=lambda: secrets.randbelow(1 << 31))
    echo: bool = False
    logprobs: bool | Likeliest = False
    top_logprobs: Likeliest = 0
    stream: bool = False
    stream_options: dict = {}

    @classmethod
    def read(cls, content: bytes, chat: bool, models: dict[str, ServedModel]) -> "Request":
        """The request of a body, in which null means nothing."""
        body = {name: value for name, value in msgspec.json.decode(content, type=dict).items() if value is not None}
        body = {"model": next(iter(models)), "max_tokens": 2048 if chat else 200} | body
        body["max_tokens"] = body.get("max_completion_tokens", body["max_tokens"])
        model = models.get(str(body["model"])) if chat else None
        sampling = (
            vars(model.sampling if model else Sampling()) | body | ({"top_k": 0} if body.get("top_k") == -1 else {})
        )  # as vLLM writes "all"
        return msgspec.convert(body | {"chat": chat, "sampling": msgspec.convert(sampling, Sampling)}, cls)

    def __post_init__(self) -> None:
        self.begun, self.top = set(), None  # the choices that were begun; how many logprobs each token has, if any
        if self.logprobs is not False:
            self.top = self.top_logprobs if self.chat else int(self.logprobs)
        self.echo &= not self.chat
        self.stop = [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]
        if isinstance(self.prompt, str) or all(isinstance(part, int) for part in self.prompt):
            self.prompt = [self.prompt]
        if any(isinstance(part, int) for part in self.prompt):
            raise ValueError("`prompt` must be a text, a list of token ids, or a list of such")
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} choices can be asked for at once")
        if not self.max_tokens and not self.echo:
            raise ValueError("`max_tokens` must be at least 1, or 0 with `echo`")

    def choices(self, steps: Iterable[tuple]) -> list[dict]:
        """Choices of an answer, or of a chunk of it, from what `ServedModel.answer` emitted."""
        groups = groupby(sorted(steps, key=itemgetter(0)), itemgetter(0))
        return [self._choice(i, *zip(*group, strict=True)) for i, group in groups]

    def _choice(self, i: int, _, texts: tuple[str], tokens: tuple[list[dict]], reasons: tuple[str | None]) -> dict:
        tokens, text = [*chain(*tokens)], "".join(texts)
        choice = {"index": i, "finish_reason": reasons[-1], "logprobs": {"content": tokens} if tokens else None}
        if self.chat:
            role = {} if i in self.begun else {"role": "assistant"}  # clients join those of chunks
            self.begun.add(i)
            return choice | {"delta" if self.stream else "message": role | {"content": text}}
        if tokens:
            choice["logprobs"] |= {"tokens": [token["token"] for token in tokens]}
            choice["logprobs"] |= {"token_logprobs": [token["logprob"] for token in tokens]}
            choice["logprobs"] |= {"top_logprobs": [by_text(token["top_logprobs"]) for token in tokens]}
        return choice | {"text": text}


def by_text(tokens: list[dict]) -> dict[str, float]:
    """Logprobs by a token's text, or by its id where a likelier one has the same text."""
    logprobs = {}
    for token in tokens:
        key = f"token_id:{token['id']}" if token["token"] in logprobs else token["token"]
        logprobs[key] = token["logprob"]
    return logprobs

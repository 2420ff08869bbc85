"""A request in OpenAI's format, and its answer by a loaded model, token by token in the worker's thread."""

import contextlib
import functools
import secrets
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta

from data.chat import ChatFormat
from data.tokenizer import Tokenizer, encode_prompt, tokens_after
from errors import UserError, reading
from files import read_json, read_toml
from generation.generate import NOT_FINITE, PrefixCache, check_prompts, generate
from generation.load import load_decoder, open_model
from generation.settings import CHAT_TOKENS, TEXT_TOKENS, Sampling, recommended_sampling
from generation.stream import TextStream, stream_texts
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.count import num_parameters
from model.device import explain_out_of_memory
from model.inspect import inspect, surgery

MAX_CHOICES = 128  # choices of one request
SCORED_AT_ONCE = 256  # tokens of a prompt: the logits of a long one would take gigabytes
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
FINISH_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "context": "length"}  # OpenAI's


class Request(msgspec.Struct, kw_only=True):
    """What a body asks for, in OpenAI's names. msgspec checks types and ranges; properties are what the model gets."""

    model: str
    sampling: Sampling
    begin_ids: list[int] = []  # not OpenAI's: the answer begins with them, and they are not sent again
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    stop: str | Annotated[list[str], Meta(max_length=64)] = []
    seed: int = msgspec.field(default_factory=lambda: secrets.randbelow(1 << 31))
    stream: bool = False
    stream_options: dict = {}
    response_format: dict = {}

    def __post_init__(self) -> None:
        if self.response_format.get("type", "text") != "text":
            raise ValueError("`response_format` other than text is not supported")

    @property
    def stop_strings(self) -> list[str]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return [text for text in stop if text]


class ChatRequest(Request, kw_only=True):
    messages: list[dict] = []
    max_tokens: Annotated[int, Meta(ge=1)] = CHAT_TOKENS
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    @property
    def wanted_top_logprobs(self) -> int | None:
        """How many likeliest tokens are sent with each token and its logprob; None if no logprobs are wanted."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Request, kw_only=True):
    prompt: str | list[str | int | list[int]] = ""
    max_tokens: Annotated[int, Meta(ge=0)] = TEXT_TOKENS
    logprobs: TopLogprobs | bool = False  # a number, of which 0 is not false; true counts as 1
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(prompt, int) for prompt in self.prompts):
            raise ValueError("`prompt` must be a text, a list of token ids, or a list of such")
        if self.n * len(self.prompts) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} choices can be asked for at once")
        if not self.max_tokens and not self.echo:
            raise ValueError("`max_tokens` must be at least 1, or 0 with `echo`")

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt)
        return [self.prompt] if is_one else self.prompt

    @property
    def wanted_top_logprobs(self) -> int | None:
        return None if self.logprobs is False else int(self.logprobs)


class InspectRequest(msgspec.Struct, kw_only=True):
    """Asks what happens while the model reads a text or, with `change`, what a surgery on its norms costs."""

    model: str
    text: str
    change: str | None = None  # one of `CHANGES`
    norm: str = "all"


class Piece(NamedTuple):
    """A part of one choice: a new token, or one of the prompt, and the text that it completed."""

    choice: int
    text: str
    token: dict | None = None  # with logprobs, if the request asks for them
    end: str | None = None  # why the choice ends here
    begins: bool = False  # whether it is the first piece of its choice


def to_choices(request: Request, pieces: Sequence[Piece]) -> list[dict]:
    """The choices of a response, or of a chunk of one, in OpenAI's format."""
    choices = []
    for index in sorted({piece.choice for piece in pieces}):
        own_pieces = [piece for piece in pieces if piece.choice == index]
        text = "".join(piece.text for piece in own_pieces)
        tokens = [piece.token for piece in own_pieces if piece.token is not None]
        choice = {"index": index, "finish_reason": own_pieces[-1].end, "logprobs": None}
        if tokens or (request.wanted_top_logprobs is not None and not request.stream):
            choice["logprobs"] = {"content": tokens}
            if isinstance(request, CompletionRequest):
                choice["logprobs"] |= completion_logprobs(tokens)
        if isinstance(request, ChatRequest):
            role = {"role": "assistant"} if own_pieces[0].begins else {}  # clients join those of chunks
            choice["delta" if request.stream else "message"] = role | {"content": text}
        else:
            choice["text"] = text
        choices.append(choice)
    return choices


def completion_logprobs(tokens: Sequence[dict]) -> dict[str, list]:
    """The logprobs of tokens as OpenAI's completions have them. Of tokens with one text the likeliest is listed."""
    listed = [[token, *reversed(token["top_logprobs"])] for token in tokens]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{t["token"]: t["logprob"] for t in top if t["logprob"] is not None} for top in listed],
    }


def model_card(name: str, directory: Path, config: ModelConfig, tokenizer: Tokenizer, sampling: Sampling) -> dict:
    """What /v1/models says of a model: OpenAI's fields, and what the page shows."""
    examples = []
    settings = directory.parent / "settings.toml"  # it may be missing, or another program's
    with contextlib.suppress(UserError), reading(settings):
        examples = [*filter(None, msgspec.convert(read_toml(settings)["run"]["sample_prompts"], list[str]))]
    return {
        "id": name, "object": "model", "owned_by": "prenorm", "sampling": vars(sampling), "created": 0,
        "chat": bool(tokenizer.chat_template), "tokenizer": tokenizer.hash, "norm": config.norm,
        "placement": config.norm_placement, "parameters": num_parameters(config),
        "context": config.max_position_embeddings,
        "validation_loss": read_json(directory / "state.json").get("best_validation_loss"),
        "examples": examples,
    }  # fmt: skip


class ServedModel:
    """A checkpoint with its tokenizer, its chat template if it has one, and the keys and values of its last prompt."""

    def __init__(self, name: str, directory: Path, dtype: str = "auto", device: str = "auto"):
        checkpoint, self.tokenizer, self.eos_ids = open_model(directory)
        self.decoder = load_decoder(checkpoint, device, dtype)
        self.device = self.decoder.embed_tokens.weight.device
        self.prefix = PrefixCache()
        self.chat_sampling = recommended_sampling(directory) or Sampling()
        self.text_sampling = recommended_sampling(directory, chat=False) or Sampling()
        self.vocab_size = min(self.tokenizer.vocab_size, checkpoint.config.vocab_size)
        self.card = model_card(name, directory, checkpoint.config, self.tokenizer, self.chat_sampling)

    @torch.inference_mode()
    def answer(self, request: Request) -> Generator[Piece | dict]:
        """The pieces of the answer, and at its end the usage. What is wrong with a prompt is raised before them."""
        with explain_out_of_memory("out of memory; send a shorter prompt, or ask for fewer samples."):
            pieces = self.chat(request) if isinstance(request, ChatRequest) else self.complete(request)
            read, written = yield from pieces
            yield {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def inspect(self, request: InspectRequest) -> Generator[bytes]:
        """One JSON: the fields of `Inspection` with five decimals and tokens as texts, or the losses of a surgery."""
        ids = [self.tokenizer.document_start, *self.tokenizer.encode(request.text)]
        with explain_out_of_memory("out of memory; send a shorter text."):
            if request.change is not None:
                fields = {"differences": surgery(self.decoder, ids, request.change, request.norm)}
            else:
                fields = dict(vars(inspect(self.decoder, ids)))
                top_ids = fields.pop("top_ids").tolist()
                text_of = functools.cache(lambda i: self.describe(i, None, 0)["token"])
                fields["tokens"] = [*map(text_of, ids)]
                fields["top_texts"] = [[[*map(text_of, likeliest)] for likeliest in tokens] for tokens in top_ids]
            yield msgspec.json.encode(fields, enc_hook=lambda tensor: tensor.double().round(decimals=5).tolist())

    def chat(self, request: ChatRequest) -> Generator[Piece, None, tuple[int, int]]:
        """Answer a conversation; returns the numbers of tokens of the prompt and of the answers."""
        chat = ChatFormat(self.tokenizer)
        ids = [*chat.encode(request.messages), *request.begin_ids]
        self.check([ids])
        streams = {i: TextStream(self.tokenizer, request.stop_strings, request.begin_ids) for i in range(request.n)}
        for choice in streams:
            yield Piece(choice, "", begins=True)
        written = yield from self.sample(request, streams, ids, self.eos_ids | chat.ends)
        return len(ids), written

    def complete(self, request: CompletionRequest) -> Generator[Piece, None, tuple[int, int]]:
        """Continue each prompt, or only score it; returns the numbers of tokens of the prompts and of the texts."""
        encoded = [self.encode(prompt, request) for prompt in request.prompts]
        written = 0
        self.check(encoded, new_tokens=request.max_tokens)
        for index, (prompt, ids) in enumerate(zip(request.prompts, encoded, strict=True)):
            # generate.py reads a prompt in one pass. A cache of an earlier request would split that pass and change the
            # last bits, so it is dropped; the cache that `score` fills is kept.
            self.prefix = PrefixCache()
            choices = range(index * request.n, (index + 1) * request.n)
            streams = {choice: TextStream(self.tokenizer, request.stop_strings, ids) for choice in choices}
            for choice, stream in streams.items():
                yield Piece(choice, stream.text if request.echo else "", begins=True)
            if request.echo and request.wanted_top_logprobs is not None:
                yield from self.score(request, choices, ids)
            if request.max_tokens:
                is_text = isinstance(prompt, str) and not request.begin_ids
                first_tokens = tokens_after(self.tokenizer, prompt) if is_text else None
                written += yield from self.sample(request, streams, ids, self.eos_ids, first_tokens)
            else:
                for choice, stream in streams.items():
                    yield Piece(choice, stream.finish(), end="length")
        return sum(map(len, encoded)), written

    def encode(self, prompt: str | list[int], request: CompletionRequest) -> list[int]:
        """The ids of a prompt. A text that is only scored begins with the token that begins a document in training."""
        if isinstance(prompt, str) and request.max_tokens:
            prompt = encode_prompt(self.tokenizer, prompt)
        elif isinstance(prompt, str):
            prompt = [self.tokenizer.document_start, *self.tokenizer.encode(prompt)]
        return prompt + request.begin_ids

    def check(self, prompts: Sequence[Sequence[int]], new_tokens: int = 1) -> None:
        """Raise `UserError` unless the model has a token for each id, and room for a new one if any is wanted."""
        if not all(ids and min(ids) >= 0 and max(ids) < self.vocab_size for ids in prompts):
            raise UserError(f"a prompt must be a text, or token ids from 0 to {self.vocab_size - 1}.")
        if new_tokens:
            check_prompts(prompts, self.decoder.config.max_position_embeddings)

    def score(self, request: Request, choices: Sequence[int], ids: list[int]) -> Iterator[Piece]:
        """The tokens of a prompt with their logprobs, which the first one does not have.

        More tokens than the context are read in windows, of which each begins with the second half of the one before.
        """
        config = self.decoder.config
        context = config.max_position_embeddings
        repeated = context - context // 2  # tokens of a window that the one before had
        for begin in range(0, max(len(ids) - repeated, 1), context // 2):
            window = ids[begin : begin + context]
            cache = KeyValueCache(config, 1, len(window), device=self.device, dtype=self.decoder.compute_dtype)
            for place, (token, logprobs) in enumerate(self.predict(window, cache)):
                if begin == 0 or place >= repeated:
                    described = self.describe(token, logprobs, request.wanted_top_logprobs)
                    for choice in choices:
                        yield Piece(choice, "", described)
            self.prefix = PrefixCache(window, cache)

    def predict(self, ids: list[int], cache: KeyValueCache) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Yield each id with the log-probabilities (V,) at its position, None for the first; fills the empty cache."""
        logprobs = None
        for start in range(0, len(ids), SCORED_AT_ONCE):
            chunk = ids[start : start + SCORED_AT_ONCE]
            logits = self.decoder(torch.tensor([chunk], device=self.device), cache=cache)[0, :, : self.vocab_size]
            if not logits.isfinite().all():
                raise UserError(NOT_FINITE)
            for token, following in zip(chunk, logits.log_softmax(-1), strict=True):
                yield token, logprobs
                logprobs = following

    def sample(
        self, request: Request, streams: dict[int, TextStream], ids: list[int], eos_ids: frozenset[int],
        first_tokens: Sequence[int] | None = None,
    ) -> Generator[Piece, None, int]:  # fmt: skip
        """A sample for each choice, with its stream; returns the number of new tokens."""
        choices = [*streams]
        # The space at the end of such a prompt is a part of the first token, and not of the text.
        with_space = set(choices) if first_tokens and not request.echo else set()
        written = 0
        tokens = generate(
            self.decoder, [ids] * request.n, max_new_tokens=request.max_tokens, sampling=request.sampling,
            seed=request.seed, sample_numbers=range(request.n), first_tokens=[first_tokens] * request.n,
            eos_ids=eos_ids, vocab_size=self.vocab_size, prefix=self.prefix,
        )  # fmt: skip
        for token in stream_texts(tokens, [*streams.values()]):
            choice, text = choices[token.sequence], token.text
            if text and choice in with_space:
                text = text.removeprefix(" ")
                with_space.remove(choice)
            described = None
            if token.end != "eos":
                written += 1
                if request.wanted_top_logprobs is not None:
                    logprobs = token.logits[token.sequence].log_softmax(-1)
                    described = self.describe(token.id, logprobs, request.wanted_top_logprobs)
            yield Piece(choice, text, described, FINISH_REASONS[token.end])
        return written

    def describe(self, token: int, logprobs: torch.Tensor | None, top: int) -> dict:
        """A token in OpenAI's format, and its id; `top_logprobs` has the most likely ones in its place."""
        likely = [] if logprobs is None else logprobs.topk(min(top, len(logprobs))).indices.tolist()
        entries = []
        for i in (token, *likely):
            text, logprob = self.tokenizer.token_bytes(i), None if logprobs is None else float(logprobs[i])
            text_fields = {"token": text.decode("utf-8", "backslashreplace"), "id": i, "bytes": [*text]}
            entries.append(text_fields | {"logprob": logprob})
        return entries[0] | {"top_logprobs": entries[1:]}

"""A loaded model, and its answers token by token. They are computed in the worker's thread."""

from collections.abc import Callable
from pathlib import Path

import torch

from checkpoints import find
from checkpoints.pretrained import open_checkpoint
from data.chat import ChatFormat
from data.tokenizer import check_vocabulary, load_tokenizer
from generation.generate import PrefixCache, generate
from generation.session import load_decoder
from generation.settings import Sampling, Settings, recommended_sampling
from generation.stream import TextStream
from model.cache import KeyValueCache
from model.device import explain_out_of_memory
from serving.request import Request


class ServedModel:
    """A checkpoint with its tokenizer, its chat template if it has one, and the keys and values of its last chat."""

    def __init__(self, name: str, directory: Path, settings: Settings):
        model, adapter = find.find_adapter(directory)
        checkpoint = open_checkpoint(model)
        self.tokenizer = load_tokenizer(directory if [*directory.glob("tokenizer.*")] else model)
        check_vocabulary(self.tokenizer, checkpoint.config.vocab_size)
        self.eos_ids, self.sampling = find.eos_ids(model, self.tokenizer.eos_id), Sampling()
        self.context, self.chat = checkpoint.config.max_position_embeddings, None
        if settings.chat or self.tokenizer.chat_template is not None:
            self.chat = ChatFormat(directory, self.tokenizer)
            self.sampling = recommended_sampling(directory) or self.sampling
        self.decoder = load_decoder(checkpoint, settings, adapter)
        self._prefix, self._anchor = PrefixCache(), self.tokenizer.encode("a")
        self.card = {"id": name, "object": "model", "owned_by": "prenorm", "created": 0, "context": self.context}
        self.card |= {"chat": self.chat is not None, "tokenizer": self.tokenizer.hash, "sampling": vars(self.sampling)}

    @explain_out_of_memory("out of memory; ask for fewer texts or tokens at once.")
    def answer(self, request: Request, emit: Callable[[tuple], object], check: Callable[[], object]) -> dict:
        """Emit (answer, text, logprob or None, finish reason or None) for each token and each end; return the usage.

        `check` is called in each step, and ends the generation by raising.
        """
        usage = {"prompt_tokens": len(request.prompt), "completion_tokens": 0}
        if request.score:
            self._score(request.prompt, request.top_logprobs or 0, emit, check)
            return usage
        streams = [TextStream(self.tokenizer, request.stop, request.prompt) for _ in range(request.samples)]
        space = [request.first is not None] * request.samples
        use_prefix = request.chat and request.samples == 1  # a completion is computed exactly as generate.py does
        self._prefix, logprobs = self._prefix if use_prefix else PrefixCache(), []
        usage["prompt_tokens_details"] = {"cached_tokens": self._prefix.cached_tokens(request.prompt)}

        def on_logits(logits: torch.Tensor) -> None:
            check()
            if request.top_logprobs is not None:
                logprobs[:] = logits.log_softmax(-1)

        def on_token(i: int, token: int) -> bool:
            text = streams[i].push(token)
            if text and space[i]:  # the prompt ends with the space of the first token
                text, space[i] = text.removeprefix(" "), False
            emit((i, text, self._describe(logprobs[i], token, request.top_logprobs) if logprobs else None, None))
            return streams[i].stopped

        def on_finish(i: int, reason: str) -> None:
            text = streams[i].flush()
            emit((i, text, None, "stop" if streams[i].stopped or reason in ("eos", "stop") else "length"))

        ends = {self.chat.end_of_turn} - {None} if request.chat else set()
        result = generate(
            self.decoder,
            [request.prompt] * request.samples,
            max_new_tokens=request.max_tokens,
            sampling=request.sampling,
            seed=request.seed,
            sample_numbers=range(request.samples),
            first_tokens=[None if request.begin else request.first] * request.samples,
            eos_ids=self.eos_ids | ends,
            vocab_size=self.tokenizer.vocab_size,
            on_token=on_token,
            on_finish=on_finish,
            on_logits=on_logits,
            prefix=self._prefix if use_prefix else None,
        )
        return usage | {"completion_tokens": sum(map(len, result.tokens))}

    @torch.inference_mode()
    def _score(self, ids: list[int], top: int, emit: Callable[[tuple], object], check: Callable[[], object]) -> None:
        """Emit the tokens of a text with their logprobs, computed in chunks. The first has none; BOS is left out."""
        device = self.decoder.embed_tokens.weight.device
        cache = KeyValueCache(self.decoder.config, 1, len(ids), device=device, dtype=self.decoder.compute_dtype)
        stream, before = TextStream(self.tokenizer), None
        for start in range(0, len(ids), 256):
            check()
            logits = self.decoder(torch.tensor([ids[start : start + 256]], device=device), cache=cache)[0]
            for token, row in zip(ids[start:], logits[:, : self.tokenizer.vocab_size].log_softmax(-1), strict=False):
                if before is not None or token != self.tokenizer.bos_id:
                    emit((0, stream.push(token), self._describe(before, token, top), None))
                before = row
        emit((0, stream.flush(), None, "length"))

    def _describe(self, logprobs: torch.Tensor | None, token: int, top: int) -> dict:
        """A token in OpenAI's format, and its id; `top_logprobs` has the likeliest in its place."""

        def entry(i: int, logprob: float | None) -> dict:
            text = self.tokenizer.decode([*self._anchor, i], special=True)[len("a") :]
            return {"token": text, "id": i, "logprob": logprob, "bytes": None if "\ufffd" in text else [*text.encode()]}

        if logprobs is None:
            return entry(token, None) | {"top_logprobs": []}
        values, ids = logprobs.topk(min(top, len(logprobs)))
        likeliest = [entry(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        return entry(token, float(logprobs[token])) | {"top_logprobs": likeliest}

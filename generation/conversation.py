"""A conversation with a chat model: what was said, within the model's context, and the key/value cache of it."""

import itertools
from collections.abc import Callable

from data.chat import ChatFormat, Message
from errors import UserError
from generation.generate import Generation, PrefixCache
from generation.prompts import check_prompts
from generation.settings import Settings
from generation.stream import TextStream


class Conversation:
    """The turns so far. An answer that was interrupted counts with the text that it has.

    `write` gets the answers bit by bit, `log` lines about them. A turn takes effect completely or not at all:
    after an exception the conversation is as it was before.
    """

    def __init__(
        self,
        continue_prompts: Callable[..., Generation],
        chat_format: ChatFormat,
        settings: Settings,
        context: int,
        write: Callable[[str], object],
        log: Callable[[str], object],
    ):
        """continue_prompts: `generate` with a decoder and the settings; context: the decoder's, in tokens."""
        self._continue_prompts, self._format, self._settings = continue_prompts, chat_format, settings
        self._context, self._write, self._log = context, write, log
        self.turns: list[tuple[Message, Message]] = []  # questions and their answers
        self._answers = 0  # since the start: the number of the next sample
        self._prefix = PrefixCache()

    def run(self, read: Callable[[], str]) -> None:
        """Answer the lines that are typed until the input ends. A `UserError` ends an answer, not the conversation."""
        leave = "/quit leaves"
        self._log(f"Ctrl-C stops an answer, /reset starts a new conversation, {leave}")
        while True:
            try:
                line = read()
                if line.strip() in ("/quit", "/exit", "exit", "quit"):
                    return
                if line.strip() == "/reset":  # others are text: models have commands of their own, such as /no_think
                    self.turns = []
                    self._log("a new conversation begins")
                elif line.strip():
                    self.answer(line)
            except EOFError:
                self._log("")  # the next prompt of the shell starts on a line of its own
                return
            except UserError as error:
                self._log(f"error: {error}")
            except KeyboardInterrupt:
                self._log(f"\n{leave}")

    def answer(self, text: str) -> None:
        """Generate the answer to `text` and write it."""
        question, turns = {"role": "user", "content": text}, [*self.turns]
        # An answer may need `max_new_tokens`, but at most half of the context is kept free for it.
        room = self._context - min(self._settings.token_limit, self._context // 2)
        while len(prompt := self._format.encode([*itertools.chain(*turns), question])) > room and turns:
            del turns[0]
        check_prompts([prompt], self._context)
        if dropped := len(self.turns) - len(turns):
            self._log(f"dropped the oldest {dropped} of {len(self.turns)} turns: the context is {self._context} tokens")
        stream, parts = TextStream(self._format.tokenizer, self._settings.stop), []

        def emit(part: str) -> bool:
            parts.append(part)
            self._write(part)
            return stream.stopped

        try:
            result = self._continue_prompts(
                [prompt],
                sample_numbers=[self._answers],
                on_token=lambda _, token: emit(stream.push(token)),
                prefix=self._prefix,
            )
            emit(stream.flush())
            end = result.finish_reasons[0]
        except KeyboardInterrupt:
            if not any(parts):
                self._log("\nstopped before the answer began; your message is forgotten")
                return
            end = "interrupted"
        self._write("\n")
        self.turns = [*turns, (question, {"role": "assistant", "content": "".join(parts)})]
        self._answers += 1
        reasons = {
            "interrupted": "stopped",
            "length": f"the answer was cut after {self._settings.token_limit} tokens (--max-new-tokens)",
            "context": "the answer ends here because the model's context is full",
        }
        if end in reasons:
            self._log(reasons[end])

"""A conversation with a chat model: what was said, within the model's context, and the key/value cache of it."""

import contextlib
import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from data.chat import ChatFormat, Message
from errors import UserError, log, printable
from generation.generate import NewToken, PrefixCache, check_prompts
from generation.settings import Settings
from generation.stream import TextStream, stream_texts

COMMANDS = "Ctrl-C stops an answer, /reset starts a new conversation, /quit leaves"


@dataclass
class Conversation:
    """The messages so far. An interrupted answer keeps the text that it has; after an error the turn is forgotten."""

    continue_prompts: Callable[..., Generator[NewToken]]  # `generate` with a decoder and the settings
    chat: ChatFormat
    settings: Settings
    context: int  # context of the decoder, in tokens
    messages: list[Message] = field(default_factory=list)  # questions and their answers in turn
    answers: int = 0  # since the start: the number of the next sample
    prefix: PrefixCache = field(default_factory=PrefixCache)

    def run(self) -> None:
        """Answer the lines that are typed until the input ends. A `UserError` ends an answer, not the conversation."""
        log(COMMANDS)
        while True:
            try:
                line = read_line()
                command = line.strip()  # others are text: models have commands of their own, such as /no_think
                if command in ("/quit", "/exit", "exit", "quit"):
                    return
                if command in ("/help", "/?"):
                    log(COMMANDS)
                elif command == "/reset":
                    self.messages = []
                    log("a new conversation begins")
                elif command:
                    if re.fullmatch("/[a-z]+", command):
                        log(f"{command} is sent to the model; /help lists the commands")
                    self.answer(line)
            except EOFError:
                log("")  # the next prompt of the shell starts on a line of its own
                return
            except UserError as error:
                log(f"error: {error}")
            except KeyboardInterrupt:
                log("\n/quit leaves")

    def answer(self, text: str) -> None:
        messages, prompt = self.drop_oldest_turns([*self.messages, {"role": "user", "content": text}])
        stream = TextStream(self.chat.tokenizer, self.settings.stop)
        try:
            tokens = self.continue_prompts([prompt], sample_numbers=[self.answers], prefix=self.prefix)
            for token in stream_texts(tokens, [stream]):
                write(token.text)
            end = stream.end
        except KeyboardInterrupt:
            if not stream.text:
                log("\nstopped before the answer began; your message is forgotten")
                return
            end = "interrupted"
        write("\n")
        self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        self.answers += 1
        reasons = {
            "interrupted": "stopped",
            "length": f"the answer was cut after {self.settings.token_limit} tokens (--max-new-tokens)",
            "context": "the answer ends here because the model's context is full",
        }
        if end in reasons:
            log(reasons[end])
        elif not stream.text:
            log("the answer is empty: it ended at once")

    def drop_oldest_turns(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages and their ids; without the oldest turns if there is no room for an answer."""
        # An answer may need `max_new_tokens`, but at most half of the context is kept free for it.
        room = self.context - min(self.settings.token_limit, self.context // 2)
        kept = messages
        prompt = self.chat.encode(kept)
        while len(prompt) > room and len(kept) > 1:
            kept = kept[2:]
            prompt = self.chat.encode(kept)
        check_prompts([prompt], self.context)
        dropped = (len(messages) - len(kept)) // 2
        if dropped:
            log(f"dropped the oldest {dropped} of {len(messages) // 2} turns: the context is {self.context} tokens")
        return kept, prompt


def write(text: str) -> None:
    """Write to standard output and flush, to a terminal without control characters."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def read_line() -> str:
    """One line that the user types, with the editing keys and the history of readline where Python has it."""
    with contextlib.suppress(ImportError):  # Windows, whose console edits lines itself
        import readline  # noqa: F401
    if sys.stdin.errors != "replace":  # the first time
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # standard output is for the text
    return input()

"""Text in, text out: a prompt and its continuation in one call."""

from data.tokenizer import Tokenizer
from generation.generate import generate
from generation.prompts import encode_prompt, first_tokens
from generation.settings import Sampling
from model.decoder import Decoder


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> str:
    """The prompt and its continuation as one string. Depends on its arguments alone; torch's global RNG is not used."""
    ids = encode_prompt(tokenizer, prompt)
    result = generate(
        decoder,
        [ids],
        first_tokens=[first_tokens(tokenizer, prompt)],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        eos_ids=(tokenizer.eos_id,),
        vocab_size=tokenizer.vocab_size,
    )
    return tokenizer.decode(ids + result.tokens[0])

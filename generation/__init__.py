"""From a prompt to text: prefill, decoding, sampling, streaming. `generation.settings` needs no torch."""

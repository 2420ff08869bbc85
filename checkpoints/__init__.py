"""A directory on disk or on the Hugging Face Hub <-> a Decoder: which directory a name means, config.json, weights."""

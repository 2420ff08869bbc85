"""Bridges to other programs: GGUF for llama.cpp, lm-eval, and whether a model means the same in each (`same`)."""

"""Bridges to other programs that nothing here imports: GGUF for llama.cpp, and lm-eval."""

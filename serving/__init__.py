"""An OpenAI-compatible server and its page, to look into models: one worker answers in order. Needs starlette, uvicorn."""

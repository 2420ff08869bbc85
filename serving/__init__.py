"""An OpenAI-compatible server with one page, to look into models. Needs starlette and uvicorn."""

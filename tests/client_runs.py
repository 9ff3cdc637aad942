"""What litellm sees of a server, as JSON: run by a Python that has litellm, with the address.

.clients/bin/python tests/client_runs.py URL KEY CONTEXT
"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for one

import litellm

litellm.suppress_debug_info = True
url, key, context = sys.argv[1], sys.argv[2], int(sys.argv[3])
MESSAGES = [{"role": "user", "content": "hello"}]


def ask(model: str, **settings: Any) -> Any:
    settings = {"max_tokens": 12, "temperature": 0, "api_key": key} | settings
    return litellm.completion(
        model=f"openai/{model}", messages=MESSAGES, api_base=f"{url}/v1", num_retries=0, **settings
    )


def fault(model: str, **settings: Any) -> dict[str, Any]:
    try:
        ask(model, **settings)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return {"kind": type(error).__name__, "status": getattr(error, "status_code", None)}
    return {"kind": None, "status": 200}


whole = ask("linear")
chunks = list(ask("linear", stream=True, stream_options={"include_usage": True}))
text = litellm.text_completion(
    model="text-completion-openai/linear",
    prompt="hello",
    api_base=f"{url}/v1",
    api_key=key,
    max_tokens=12,
    temperature=0,
)
found = {
    "chat": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "text": text.choices[0].text,
    "faults": {
        "unknown model": fault("missing"),
        "bad field": fault("linear", temperature=-1.0),
        "too long": fault("linear", max_tokens=context + 1),
        "wrong key": fault("linear", api_key="wrong"),
        "damaged variant": fault("norms"),
    },
}
print(json.dumps(found))

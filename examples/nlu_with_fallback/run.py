"""One task, two kinds of engines: Triton sorts a sentence into labels; when an operator says so, an LLM does.

    GATEWAY_KEY=... GATEWAY_ADMIN_TOKEN=... python examples/nlu_with_fallback/run.py

It names the LLM as fallback in the rule `nlu`, asks, sets a switch for a minute that sends such requests to fallbacks
alone, asks again, and puts everything back. The answers have the same form; only `route` says who gave them. (The very
small model of `make up` keeps to the labels, but chooses badly among them: a rule for people names a larger one.)

Prints:

    triton/text_embedding: billing; scores of 3 labels, which add up to 1.00
    llm/smollm2: ...; scores of 3 labels, which add up to 1.00
    triton/text_embedding: billing; scores of 3 labels, which add up to 1.00
"""

import os
import sys

import httpx

URL, KEY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not KEY:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)
ADMIN_URL, TOKEN = os.environ.get("GATEWAY_ADMIN_URL", "http://127.0.0.1:8090"), os.environ.get("GATEWAY_ADMIN_TOKEN")
if not TOKEN:
    print(
        "set GATEWAY_ADMIN_TOKEN: after `make up` it is in .run/admin-token (see examples/README.md)", file=sys.stderr
    )
    sys.exit(2)
TASK, LABELS = "custom_nlu", ["billing", "shipping", "praise"]

gateway = httpx.Client(base_url=URL, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
admin = httpx.Client(base_url=f"{ADMIN_URL}/admin/v1", headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)


def ask() -> None:
    """Sort one sentence, and print who did it."""
    sentence = {"input": {"text": "my card was charged twice", "labels": LABELS}}
    answer = gateway.post(f"/v1/tasks/{TASK}", json=sentence).raise_for_status().json()
    output, route = answer["output"], answer["route"]
    told = f"scores of {len(output['scores'])} labels, which add up to {sum(output['scores']):.2f}"
    print(f"{route['backend']}/{route['model']}: {output['label']}; {told}")


before = admin.get("/rules").raise_for_status().json()
rules = [dict(rule) for rule in before["rules"]]
for rule in rules:
    if rule["match"]["task"] == TASK:
        rule["fallback"] = [{"backend": "llm", "model": "smollm2"}, *rule["fallback"]]
        rule["attempt_timeout_ms"] = 20_000  # an LLM may take longer to begin than a tensor model
# If-Match: the change is refused where somebody else has changed the rules meanwhile.
admin.put("/rules", json={"rules": rules}, headers={"if-match": str(before["revision"])}).raise_for_status()
try:
    ask()
    wish = {"action": "force_fallback", "scope": {"task": TASK}, "ttl_s": 60, "reason": "an example"}
    switch = admin.post("/switches", json=wish).raise_for_status().json()
    try:
        ask()
    finally:
        admin.delete(f"/switches/{switch['id']}").raise_for_status()
    ask()
finally:
    admin.post("/rules/rollback", json={"revision": before["revision"]}).raise_for_status()

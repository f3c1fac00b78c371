#!/bin/sh
# Every kind of request once, with curl alone.
#
#     GATEWAY_KEY=... sh examples/curl.sh
#
# Prints:
#
#     200 GET /healthz/ready
#     200 GET /v1/tasks
#     200 GET /v1/tasks/custom_nlu
#     200 POST /v1/infer
#     200 POST /v1/infer/batch
#     200 POST /v1/tasks/custom_nlu
#     200 POST /v1/tasks/image-classification
#     200 POST /v1/tasks/speech-activity
#     200 GET /v1/models
#     200 GET /v1/models/general_llm
#     200 POST /v1/embeddings
#     200 POST /v1/chat/completions
#     200 POST /v1/completions
#     201 POST /v1/client-tokens
#     200 GET /v2/models/text_embedding
#     200 POST /v2/models/text_embedding/infer
#     401 GET /v1/models
set -eu

if [ -z "${GATEWAY_KEY:-}" ]; then
    echo 'set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)' >&2
    exit 2
fi
url=${GATEWAY_URL:-http://127.0.0.1:8080}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

call() {  # call METHOD PATH [curl's own options]: prints the status; the answer is in $work/answer
    method=$1 path=$2
    shift 2
    printf '%s %s %s\n' "$(curl -s -o "$work/answer" -w '%{http_code}' -X "$method" "$url$path" "$@")" "$method" "$path"
}
asked() { call "$@" -H "Authorization: Bearer $GATEWAY_KEY"; }
json() { method=$1 path=$2 body=$3; asked "$method" "$path" -H 'Content-Type: application/json' -d "$body"; }

call GET /healthz/ready
asked GET /v1/tasks
asked GET /v1/tasks/custom_nlu
json POST /v1/infer '{"task": "text-embedding", "input": {"text": "hello"}}'
json POST /v1/infer/batch '{"requests": [{"task": "text-embedding", "input": {"text": "one"}},
                                         {"task": "text-embedding", "input": {"text": "two"}}]}'
json POST /v1/tasks/custom_nlu '{"input": {"text": "where is my parcel", "labels": ["billing", "shipping"]}}'
# a picture of one red pixel, as any upload
printf 'GIF87a\001\000\001\000\200\000\000\377\000\000\000\000\000,\000\000\000\000\001\000\001\000\000\002\002D\001\000;' \
    > "$work/pixel.gif"
asked POST /v1/tasks/image-classification -F "image=@$work/pixel.gif" -F top_k=1
# a chunk of silence: 512 samples of 16 bits, the first and last of its sequence
head -c 1024 /dev/zero > "$work/silence.raw"
asked POST /v1/tasks/speech-activity -H 'Content-Type: audio/l16' -H "X-Sequence-Id: curl-$$" \
    -H 'X-Sequence-Start: true' -H 'X-Sequence-End: true' --data-binary "@$work/silence.raw"
asked GET /v1/models
asked GET /v1/models/general_llm
json POST /v1/embeddings '{"model": "text-embedding", "input": "hello"}'
json POST /v1/chat/completions '{"model": "general_llm", "max_tokens": 8,
                                 "messages": [{"role": "user", "content": "Say hello."}]}'
json POST /v1/completions '{"model": "general_llm", "max_tokens": 8, "prompt": "Once upon a time"}'
json POST /v1/client-tokens '{"tasks": ["text-embedding"], "minutes": 1}'
asked GET /v2/models/text_embedding
json POST /v2/models/text_embedding/infer \
    '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}]}'
call GET /v1/models  # without a key

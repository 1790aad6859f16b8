"""Flags of llama-server and vLLM: their other names, and those that change nothing of memory.

Sources: llama.cpp of November 2026, ``tools/server/README.md``; vLLM 0.33, ``vllm/engine/arg_utils.py`` and
``vllm/entrypoints/openai/cli_args.py`` (those that are commonly given).
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _with_aliases(text: str) -> dict[str, tuple[str, ...]]:
    """Flags with their other names, which follow them, from a list with commas."""
    return {name: tuple(others) for name, *others in map(str.split, text.split(","))}


LLAMACPP = _with_aliases(
    """
    --ctx-size -c, --parallel -np, --batch-size -b, --ubatch-size -ub, --cache-type-k -ctk, --cache-type-v -ctv,
    --flash-attn -fa, --kv-unified -kvu, --no-kv-unified -no-kvu, --swa-full, --cache-ram -cram, --fit -fit,
    --n-gpu-layers -ngl --gpu-layers, --n-cpu-moe -ncmoe, --model -m, --hf-repo -hf -hfr, --hf-file -hff,
    --defrag-thold -dt, --cache-reuse, --ctx-checkpoints -ctxcp --swa-checkpoints, --checkpoint-min-step -cms,
    --slot-prompt-similarity -sps, --keep, --cache-idle-slots, --no-cache-idle-slots, --cache-prompt,
    --no-cache-prompt, --context-shift, --no-context-shift, --threads -t
    """
)
"""Flags of llama-server that are looked at, and their other names."""

VLLM = _with_aliases(
    """
    --model, --max-model-len, --max-num-seqs, --max-num-batched-tokens, --gpu-memory-utilization, --kv-cache-dtype,
    --block-size, --num-gpu-blocks-override, --tensor-parallel-size -tp, --quantization -q, --dtype,
    --enable-prefix-caching, --no-enable-prefix-caching, --enable-chunked-prefill, --no-enable-chunked-prefill
    """
)
"""Flags of ``vllm serve`` that are looked at, and their other names."""

OLLAMA = ("OLLAMA_CONTEXT_LENGTH", "OLLAMA_NUM_PARALLEL", "OLLAMA_KV_CACHE_TYPE", "OLLAMA_FLASH_ATTENTION")
"""Variables of Ollama that are looked at (``envconfig/config.go``)."""

OLLAMA_OTHERS = _words(
    """
    AUTH DEBUG DEBUG_LOG_REQUESTS EDITOR GO_TEMPLATE GPU_OVERHEAD HOST IGPU_ENABLE KEEP_ALIVE LLM_LIBRARY LOAD_TIMEOUT
    MAX_LOADED_MODELS MAX_QUEUE MAX_TRANSFER_STREAMS MODELS NOHISTORY NOPRUNE NO_CLOUD ORIGINS REMOTES SCHED_SPREAD
    VULKAN
    """
)
"""What follows ``OLLAMA_`` in its other variables."""

LLAMACPP_OTHERS = _words(
    """
    -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll --numa -n --predict
    --n-predict --perf --no-perf -e --escape --no-escape --rope-scaling --rope-scale --rope-freq-base
    --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -kvo
    --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host --rpc -lm --load-mode --mlock --mmap
    --no-mmap -dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe  -ncffn --n-cpu-ffn
    --moe-cache-mib -sm --split-mode -ts --tensor-split -mg --main-gpu -fitt --fit-target -fitc --fit-ctx
    --check-tensors --override-kv --op-offload --no-op-offload --lora --lora-scaled --control-vector -mu --model-url
    -dr --docker-repo -hft --hf-token --log-disable --log-file --log-colors -v --verbose --log-verbose --offline -lv
    --verbosity --log-verbosity --log-prefix --log-timestamps -ctkd --cache-type-k-draft -ctvd --cache-type-v-draft
    --samplers -s --seed --ignore-eos --temp --temperature --top-k --top-p --min-p --top-nsigma --xtc-probability
    --xtc-threshold --typical --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier
    --dry-base --dry-allowed-length --dry-penalty-last-n --mirostat --mirostat-lr --mirostat-ent -l --logit-bias
    --grammar --grammar-file -j --json-schema -jf --json-schema-file --kv-unified-per-slot
    -r --reverse-prompt -sp --special --warmup --no-warmup --spm-infill
    --pooling -cb --cont-batching -nocb --no-cont-batching -mm --mmproj -mmu --mmproj-url --no-mmproj --mmproj-offload
    --no-mmproj-offload -a --alias --tags --host --port --reuse-port --path --api-prefix --ui --webui --no-ui
    --no-webui --embedding --embeddings --rerank --reranking --api-key --api-key-file --ssl-key-file --ssl-cert-file
    --chat-template-kwargs -to --timeout --threads-http --metrics --props --slots --no-slots --slot-save-path
    --media-path --models-dir --models-preset --models-max --jinja --no-jinja --reasoning-format -rea --reasoning
    --reasoning-effort --reasoning-budget --chat-template --chat-template-file -md --model-draft -ngld --draft-max
    --draft-min --spec-type --draft --draft-n --draft-n-min --draft-p-min --spec-draft-model --spec-draft-n-max
    --spec-draft-n-min --spec-draft-p-min --spec-draft-ngl --spec-synth-len --spec-synth-rates
    """
)

VLLM_OTHERS = _words(
    """
    --host --port --served-model-name --api-key --trust-remote-code --tokenizer --tokenizer-mode --revision --seed
    --download-dir --load-format --enforce-eager --pipeline-parallel-size -pp --data-parallel-size -dp
    --enable-expert-parallel --swap-space --cpu-offload-gb --kv-transfer-config --speculative-config --hf-overrides
    --rope-scaling --max-seq-len-to-capture --compilation-config -O --attention-backend --chat-template
    --enable-auto-tool-choice --tool-call-parser --reasoning-parser --generation-config --limit-mm-per-prompt
    --disable-log-requests --disable-log-stats --enable-log-requests --uvicorn-log-level --async-scheduling
    --no-async-scheduling --scheduling-policy --long-prefill-token-threshold --max-num-partial-prefills --enable-lora
    --max-loras --max-lora-rank --lora-modules --guided-decoding-backend --distributed-executor-backend
    --kv-cache-memory-bytes --num-scheduler-steps --preemption-mode --response-role --allowed-origins --ssl-keyfile
    --ssl-certfile --root-path --enable-prompt-tokens-details --task --runner --convert --config
    --override-generation-config
    """
)

SWITCHES = _words(
    """
    -kvu --kv-unified -no-kvu --no-kv-unified --swa-full --context-shift --no-context-shift --cache-idle-slots
    --no-cache-idle-slots --cache-prompt --no-cache-prompt --enable-prefix-caching --no-enable-prefix-caching
    --enable-chunked-prefill --no-enable-chunked-prefill
    """
)
"""Flags behind which no value stands."""

_DRAFTS = (
    "drafts take memory and passes of their own, which are not in this answer; kvsim plan --drafter counts the one, "
    "kvsim compare --draft-tokens weighs both"
)
NOT_COUNTED = dict.fromkeys(
    ("--speculative-config", "-md", "--model-draft", "--spec-draft-model", "--spec-type"), _DRAFTS
)
"""Flags whose effect is not in an answer about memory."""

WITHOUT_EFFECT = {
    "--defrag-thold": "ignored since b6975: there is no defragmentation any more",
    "--swap-space": "without effect since vLLM's V1 engine, which computes again instead of swapping",
    "--num-scheduler-steps": "without effect in vLLM's V1 engine",
    "--preemption-mode": "without effect in vLLM's V1 engine",
    "--max-seq-len-to-capture": "without effect in vLLM's V1 engine",
}
"""Flags that are accepted, or were, and do nothing."""

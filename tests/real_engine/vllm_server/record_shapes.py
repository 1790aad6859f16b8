"""Records how vLLM divides memory among the layers of models, without a GPU: run by the Python that has vLLM.

    python record_shapes.py MODELS.toml OUT.json [NAME ...]

Of each model: the block size that vLLM sets, its groups of layers, bytes of a block, and how many requests of a length
fit into a memory. ``ModelConfig``, the sizes of states, ``_align_hybrid_block_size``, ``get_kv_cache_groups`` and
``get_max_concurrency_for_kv_cache_config`` are the real ones. The layers are not built: their specs are made here of
what ``ModelConfig`` says, and the backend of attention is one that takes blocks of any multiple of 16 tokens, as
FlashAttention does.
"""

import json
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "jamba": "JambaForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}
DRAFTERS = {
    "llama-3.1-8b": ("head", "llama-3.2-1b"),
    "qwen3-32b": ("qwen3-0.6b",),
    "gpt-oss-20b": ("head",),
    "gemma-3-27b": ("head",),
    "deepseek-v3": ("head",),
}
"""What is recorded beside a model too: models that draft, or one layer more as EAGLE and MTP have."""
MEMORY, LENGTH, BATCH, SEQUENCES = 40 << 30, 8192, 8192, 256


class Backend:
    """What is asked of a backend of attention."""

    get_supported_kernel_block_sizes = staticmethod(lambda: [MultipleOf(16)])
    customize_spec = staticmethod(lambda spec: spec)


def config_of(fields, folder, caching):
    """The real configuration of a server of a model."""
    fields = {key: value for key, value in fields.items() if key not in ("source", "quantization_config")}
    kind = fields["model_type"]
    fields["architectures"] = [ARCHITECTURES[kind]]
    fields["model_type"] = {"kimi_k2": "deepseek_v3"}.get(kind, kind)
    fields["max_position_embeddings"] = max(fields.get("max_position_embeddings", 0), 2 * LENGTH)
    (folder / "config.json").write_text(json.dumps(fields))
    model = ModelConfig(
        model=str(folder), dtype="bfloat16", max_model_len=LENGTH, skip_tokenizer_init=True, trust_remote_code=False
    )
    made = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=caching and model.is_prefix_caching_supported),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=BATCH,
            max_model_len=LENGTH,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig("cpu"),
    )
    # What a server with a GPU has; on a processor blocks are larger, and steps are not composed ahead.
    cache = made.cache_config
    cache.block_size, cache.cache_dtype, cache.kv_cache_layout = 16, "auto", "LBHNC"
    made.scheduler_config.async_scheduling = True
    return made


def layers_of(config):
    """The kinds of layers that cache something, in order."""
    model, text = config.model_config, config.model_config.hf_text_config
    n = model.get_num_layers(config.parallel_config)
    if model.is_attention_free:
        return ["state"] * n
    told = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if text.model_type == "falcon_h1":
        return ["full", "state"] * n
    if text.model_type == "zamba2":
        return [kind for told in text.layers_block_type for kind in ("full", "state")[told != "hybrid" :]]
    if model.is_hybrid:
        states = ("linear_attention", "mamba", "conv", "kda", "gdn")
        kinds = ["state" if kind in states else "full" if "attention" in kind else None for kind in told]
        return [kind for kind in kinds if kind]
    local = {"sliding_attention": "window", "chunked_attention": "chunked"}
    kinds = [local.get(kind, "full") for kind in told or ["full"] * n]
    if told is None and getattr(text, "sliding_window", None):
        kinds = ["window"] * n
    return kinds[: n - getattr(text, "num_kv_shared_layers", 0)]


def specs_of(config):
    """The specs of all layers, made as the layers make them."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    if model.is_hybrid or model.is_attention_free:
        cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
        state = MambaSpec(
            shapes=cls.get_mamba_state_shape_from_config(config),
            dtypes=cls.get_mamba_state_dtype_from_config(config),
            block_size=cache.mamba_block_size,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_cache_mode=cache.mamba_cache_mode,
        )
    row = {
        "block_size": cache.block_size,
        "num_kv_heads": 1 if model.is_attention_free else model.get_num_kv_heads(parallel),
        "head_size": 1 if model.is_attention_free else model.get_head_size(),
        "dtype": torch.bfloat16,
    }
    found = {}
    for i, kind in enumerate(layers_of(config)):
        if kind == "state":
            found[f"layer.{i}"] = state
        elif kind == "window":
            found[f"layer.{i}"] = SlidingWindowSpec(**row, sliding_window=text.sliding_window)
        elif kind == "chunked" or not model.use_mla:  # Without the hybrid manager chunks are full attention.
            found[f"layer.{i}"] = FullAttentionSpec(**row)
        else:
            found[f"layer.{i}"] = MLAAttentionSpec(**row)
            if hasattr(text, "index_topk"):  # As ``Indexer`` in ``deepseek_v2.py``: 8 bits, and a scale in 32.
                key = {"num_kv_heads": 1, "head_size": text.index_head_dim // 128 * 132, "dtype": torch.uint8}
                found[f"layer.{i}.index"] = MLAAttentionSpec(**row | key)
    return found


def drafter_specs(fields, specs):
    """The specs of the layers of what drafts: those of a model, or of one layer of full attention for ``None``."""
    if fields is None:
        full = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
        return {"draft.0": full[0]}
    with tempfile.TemporaryDirectory() as folder:
        found = specs_of(config_of(fields, Path(folder), True))
    return {f"draft.{name}": spec for name, spec in found.items()}


def record(fields, folder, caching, drafters=()):
    """What vLLM makes of a model, and of what drafts beside it."""
    config = config_of(fields, folder, caching)
    model, cache = config.model_config, config.cache_config
    if model.is_hybrid:
        type(current_platform)._find_non_ssm_backends = classmethod(lambda cls, config: [Backend])
        current_platform._align_hybrid_block_size(config, Backend)
    specs = specs_of(config)
    for drafter in drafters:
        specs |= drafter_specs(drafter, specs)
    groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    made = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, MEMORY)
    state = next((spec for spec in specs.values() if isinstance(spec, MambaSpec)), None)
    needed = [-(-g.kv_cache_spec.max_memory_usage_bytes(config) // g.kv_cache_spec.page_size_bytes) for g in groups]
    return {
        "mode": cache.mamba_cache_mode if state else None,
        "block_size": None if model.is_attention_free else cache.block_size,
        "state_bytes": state and state.real_page_size_bytes,
        "page_bytes": next(iter(specs.values())).page_size_bytes,
        "layers": len(specs),
        "groups": [len(group.layer_names) for group in groups],
        "blocks_of_a_request": needed,
        "blocks": made.num_blocks,
        "concurrency": kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, made),
    }


def main(table, out, *names):
    known = tomllib.loads(Path(table).read_text())
    found = {}
    for name in names or [name for name, fields in known.items() if fields["model_type"] in ARCHITECTURES]:
        for caching in (True, False):
            key = name if caching else f"{name} without prefix caching"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[key] = record(known[name], Path(folder), caching)
                    print(key, found[key], flush=True)
                except Exception as e:  # The next model may do.
                    print(key, repr(e)[:600], flush=True)
            if not found.get(key, {}).get("mode"):
                break
        for drafter in DRAFTERS.get(name, ()):
            with tempfile.TemporaryDirectory() as folder:
                found[f"{name} beside {drafter}"] = record(known[name], Path(folder), True, [known.get(drafter)])
    header = {"vllm": vllm.__version__, "memory": MEMORY, "length": LENGTH, "batch": BATCH, "sequences": SEQUENCES}
    Path(out).write_text(json.dumps(header | {"models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

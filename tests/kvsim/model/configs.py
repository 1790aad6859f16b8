"""Published config.json files of families of which no model is shipped by name, and what others count of them.

Weights are what transformers 5.19 counts of a model on torch's meta device, made of the same keys, unless a case says
otherwise; corrections of routers, which are buffers there, are added. Caches and states are those of vLLM 0.33 (the
specs of its layers), in numbers of a token or of a sequence.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model, its keys, its weights, and its groups: their kind, layers, and numbers."""

    source: str
    parameters: int
    groups: list[tuple[str, int, int | tuple[int, int]]]
    config: dict[str, Any]


def latents(**own: Any) -> dict[str, Any]:
    """The keys of a latent as most have it."""
    return {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128} | own


RWKV7 = {
    "model_type": "rwkv7",
    "head_dim": 64,
    "vocab_size": 65536,
    "a_low_rank_dim": 96,
    "decay_low_rank_dim": 96,
    "v_low_rank_dim": 64,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "a.x-k1": Published(
        "https://huggingface.co/skt/A.X-K1/blob/main/config.json",
        518_983_052_288 + 60 * 192,
        [("latent", 61, 576)],
        latents(
            model_type="axk1",
            vocab_size=163840,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=64,
            n_shared_experts=1,
            n_routed_experts=192,
            q_lora_rank=1536,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
        ),
    ),
    "glm-5": Published(
        "https://huggingface.co/zai-org/GLM-5/blob/main/config.json",
        743_911_199_232 + 75 * 256,
        [("latent", 78, 576), ("index", 78, 128)],
        latents(
            model_type="glm_moe_dsa",
            vocab_size=154880,
            hidden_size=6144,
            intermediate_size=12288,
            moe_intermediate_size=2048,
            num_hidden_layers=78,
            num_attention_heads=64,
            n_shared_experts=1,
            n_routed_experts=256,
            q_lora_rank=2048,
            v_head_dim=256,
            qk_nope_head_dim=192,
            index_head_dim=128,
            index_n_heads=32,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
        ),
    ),
    "hy4-preview": Published(
        "https://huggingface.co/tencent/Hy4-preview/blob/main/config.json",
        58_278_193_133 + 33 * 256,
        [("latent", 34, 576), ("index", 10, 128)],
        latents(
            model_type="hy_v4",
            vocab_size=120832,
            hidden_size=2816,
            intermediate_size=6912,
            moe_intermediate_size=768,
            num_hidden_layers=34,
            num_attention_heads=32,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            q_lora_rank=1536,
            qk_nope_head_dim=192,
            v_head_dim=256,
            index_head_dim=128,
            index_n_heads=16,
        ),
    ),
    "ling-2.5-mini": Published(
        "https://github.com/AI-Hypercomputer/maxtext (Ling2CheckpointConversionTest)",
        # By the modules of vLLM 0.33 (bailing_moe_linear.py): embeddings and head, layers with latents, those with
        # lightning attention, norms of layers, a dense network, experts.
        2 * 157184 * 2048
        + 2048
        + 4 * (2048 * 256 + 256 + 256 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048)
        + 16 * (5 * 2048 * 2048 + 2048 + 2 * 128)
        + 20 * 2 * 2048
        + 3 * 2048 * 5120
        + 19 * (257 * 3 * 2048 * 512 + 256 * 2048 + 256),
        [("latent", 4, 576), ("state", 16, (0, 16 * 128 * 128))],
        latents(
            model_type="bailing_hybrid",
            hidden_size=2048,
            intermediate_size=5120,
            num_hidden_layers=20,
            num_attention_heads=16,
            head_dim=128,
            vocab_size=157184,
            layer_group_size=5,
            q_lora_rank=256,
            first_k_dense_replace=1,
            num_experts=256,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=512,
        ),
    ),
    "ling-3.0-tiny": Published(
        "https://huggingface.co/inclusionAI/Ling-3.0-tiny/blob/main/config.json",
        7_893_392_800,  # llama.cpp calls it 7.9B.
        [("latent", 6, 576), ("state", 18, (18_432, 262_144))],
        latents(
            model_type="bailing_hybrid",
            hidden_size=1536,
            intermediate_size=4608,
            num_hidden_layers=24,
            num_attention_heads=16,
            head_dim=128,
            vocab_size=157184,
            layer_group_size=4,
            short_conv_kernel_size=4,
            no_kda_lora=True,
            gated_attention_proj_granularity_type="head_wise",
            q_lora_rank=256,
            first_k_dense_replace=1,
            num_experts=128,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=512,
            moe_shared_expert_intermediate_size=512,
        ),
    ),
    "ling-3.0-flash": Published(
        "https://huggingface.co/inclusionAI/Ling-3.0-flash/blob/main/config.json",
        124_414_211_552,  # llama.cpp calls it 124B.
        [("latent", 7, 576), ("state", 35, (36_864, 524_288))],
        latents(
            model_type="bailing_hybrid",
            hidden_size=2560,
            intermediate_size=6144,
            num_hidden_layers=42,
            num_attention_heads=32,
            head_dim=128,
            vocab_size=157184,
            layer_group_size=6,
            short_conv_kernel_size=4,
            no_kda_lora=True,
            gated_attention_proj_granularity_type="head_wise",
            q_lora_rank=None,
            first_k_dense_replace=2,
            num_experts=512,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=768,
            moe_shared_expert_intermediate_size=768,
        ),
    ),
    "longcat-flash": Published(
        "https://huggingface.co/meituan-longcat/LongCat-Flash-Chat/blob/main/config.json",
        # There experts without weights have gates, which files have not.
        741_053_585_408 - 28 * 256 * 2 * 2048 * 6144 + 28 * 768,
        [("latent", 56, 576)],
        latents(
            model_type="longcat_flash",
            vocab_size=131072,
            hidden_size=6144,
            num_layers=28,
            num_attention_heads=64,
            ffn_hidden_size=12288,
            q_lora_rank=1536,
            moe_topk=12,
            n_routed_experts=512,
            zero_expert_num=256,
            expert_ffn_hidden_size=2048,
        ),
    ),
    "minicpm3-4b": Published(
        "https://huggingface.co/openbmb/MiniCPM3-4B/blob/main/config.json",
        4_073_875_968,
        [("full", 62, 40 * (64 + 32) + 40 * 64)],
        {
            "model_type": "minicpm3",
            "hidden_size": 2560,
            "num_hidden_layers": 62,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "intermediate_size": 6400,
            "vocab_size": 73448,
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
        },
    ),
    "mistral-small-4-119b": Published(
        "https://huggingface.co/mistralai/Mistral-Small-4-119B-2603/blob/main/config.json",
        118_972_826_624,
        [("latent", 36, 320)],
        latents(
            model_type="mistral4",
            vocab_size=131072,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=2048,
            num_hidden_layers=36,
            num_attention_heads=32,
            n_shared_experts=1,
            n_routed_experts=128,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            q_lora_rank=1024,
            num_experts_per_tok=4,
        ),
    ),
    "plamo-2-1b": Published(
        "https://huggingface.co/pfnet/plamo-2-1b/blob/main/config.json",
        # By the tensors that llama.cpp loads (models/plamo2.cpp): embeddings, layers with Mamba 2, with attention, all.
        100_000 * 2048
        + 2048
        + 8 * (2048 * 8192 + 4096 * (128 + 128) + 128 * 32 + 4096 * 2048 + 4 * 4096 + 3 * 32 + 128 + 128)
        + 8 * (2048 * 18 * 128 + 17 * 128 + 2048 * 2048)
        + 16 * (3 * 2048 * 8192 + 4 * 2048),
        [("full", 8, 256), ("state", 8, (12_288, 262_144))],
        {
            "model_type": "plamo2",
            "hidden_size": 2048,
            "hidden_size_per_head": 128,
            "intermediate_size": 8192,
            "mamba_d_conv": 4,
            "mamba_d_state": 64,
            "mamba_num_heads": 32,
            "mamba_step": 2,
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 1,
            "vocab_size": 100000,
        },
    ),
    "rwkv6-1.6b": Published(
        "https://huggingface.co/RWKV/v6-Finch-1B6-HF/blob/main/config.json",
        # By the tensors that llama.cpp loads (models/rwkv6.cpp).
        2 * 65536 * 2048 + 4 * 2048 + 24 * (13 * 2048**2 + 2048 * (2 * (5 * 32 + 64) + 16)),
        [("state", 24, (4096, 131_072))],
        {
            "model_type": "rwkv6",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "head_size": 64,
            "vocab_size": 65536,
            "intermediate_size": None,
        },
    ),
    "rwkv7-1.5b": Published(
        "https://huggingface.co/RWKV/RWKV7-Goose-World3-1.5B-HF/blob/main/config.json",
        1_527_404_544,  # arXiv:2503.14456, table of sizes; so for the next.
        [("state", 24, (4096, 131_072))],
        RWKV7 | {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192, "gate_low_rank_dim": 256},
    ),
    "rwkv7-2.9b": Published(
        "https://huggingface.co/RWKV/RWKV7-Goose-World3-2.9B-HF/blob/main/config.json",
        2_947_735_040,
        [("state", 32, (5120, 163_840))],
        RWKV7 | {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": None, "gate_low_rank_dim": 320},
    ),
    "sarvam-105b": Published(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge (TestSarvamMLABridge)",
        # By the modules of vLLM 0.33 (sarvam.py): embeddings and head, latents, norms, a dense network, experts.
        2 * 262144 * 4096
        + 4096
        + 32 * (4096 * 64 * 192 + 4096 * 576 + 512 + 512 * 64 * 256 + 64 * 128 * 4096 + 2 * 4096)
        + 3 * 4096 * 16384
        + 31 * (129 * 3 * 4096 * 2048 + 128 * 4096 + 128),
        [("latent", 32, 576)],
        latents(
            model_type="sarvam_mla",
            num_hidden_layers=32,
            hidden_size=4096,
            intermediate_size=16384,
            moe_intermediate_size=2048,
            num_attention_heads=64,
            num_experts=128,
            num_experts_per_tok=8,
            num_shared_experts=1,
            vocab_size=262144,
        ),
    ),
    "youtu-llm-2b": Published(
        "https://huggingface.co/tencent/Youtu-LLM-2B/blob/main/config.json",
        1_961_560_064,
        [("latent", 32, 576)],
        latents(
            model_type="youtu",
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=32,
            num_attention_heads=16,
            q_lora_rank=1536,
        ),
    ),
    "zamba2-1.2b": Published(
        "https://huggingface.co/Zyphra/Zamba2-1.2B/blob/main/config.json",
        1_215_064_704,
        [("full", 6, 8192), ("state", 38, (13_056, 524_288))],
        {
            "model_type": "zamba2",
            "hidden_size": 2048,
            "num_hidden_layers": 38,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "vocab_size": 32000,
            "mamba_d_state": 128,
            "mamba_ngroups": 1,
            "n_mamba_heads": 64,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "use_shared_attention_adapter": True,
            "layers_block_type": ["hybrid" if i in (5, 11, 17, 23, 29, 35) else "mamba" for i in range(38)],
        },
    ),
}

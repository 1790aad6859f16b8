"""Points of our own, in the format of the table that aiconfigurator-core has."""

COLUMNS = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,gemm_quant_mode,"
    "batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,"
    "prefill_num_workers,prefill_tp_size,decode_batch_size,decode_num_workers,decode_tp_size,decode_attention_dp_size"
)
ROWS = (
    # Llama 3.1 8B on one H100, alone and by four and sixteen clients; measured, as it were, at 20 ms and 8 ms.
    "alone,ours,vllm,0.24.0,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,,agg,256,8,,1.0,1.0,1.0,,,,20.0,8.0",
    "four,ours,vllm,0.24.0,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,,agg,256,8,,4.0,1.0,1.0,,,,20.0,8.0",
    "many,ours,vllm,0.12.0,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,,agg,512,4,,16.0,1.0,1.0,,,,40.0,9.0",
    "apart,ours,vllm,0.24.0,meta-llama/Llama-3.1-8B,h100_sxm,,disagg,256,8,,,,,,,,20.0,8.0",
    "halves,ours,vllm,0.24.0,meta-llama/Llama-3.1-8B,h100_sxm,,disagg,256,8,,,,,,,,20.0,8.0,1,1,2,2,1,1",
    "shared,ours,vllm,0.24.0,Qwen/Qwen3-30B-A3B,h100_sxm,,agg,256,8,,4.0,2.0,1.0,,4.0,1.0,20.0,8.0",
    "staged,ours,vllm,0.24.0,meta-llama/Llama-3.1-8B,h100_sxm,,agg,256,8,,4.0,1.0,2.0,,,,20.0,8.0",
    "other,ours,sglang,0.5.9,meta-llama/Llama-3.1-8B,h100_sxm,,agg,256,8,,4.0,1.0,1.0,,,,20.0,8.0",
    "unknown,ours,vllm,0.24.0,someone/Some-Model-7B-FP8,h100_sxm,fp8,agg,256,8,fp8,4.0,1.0,1.0,,,,20.0,8.0",
)
REPLAYED = ("alone", "four", "many", "halves")
"""Points that can be replayed with the profiles that ship."""


def write_points(path, *rows):
    """A file with these rows, by default all of ours."""
    path.write_text("\n".join([COLUMNS, *(rows or ROWS)]) + "\n")
    return path

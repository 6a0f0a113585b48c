"""onnxruntime-genai's builder: linear RoPE scaling of Llama is dropped.

`LlamaModel.make_rope_init` handles "llama3" alone and does not call the base class, which scales linearly, or
refuses what it does not know. No message. Control: `rope_type="default"` agrees. The same with "yarn".
Published: deepseek-ai/deepseek-coder-1.3b, 6.7b, 33b (LlamaForCausalLM, linear, factor 4),
lmsys/vicuna-7b-v1.5-16k.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "onnxruntime-genai==0.18.0",
#     "onnxruntime==1.32.0",
#     "onnx==1.23.2",
#     "onnx-ir==1.1.0",
# ]
# ///

from tiny import error, genai, report

wrong = error(genai, "Llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
control = error(genai, "Llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
report(wrong, control)

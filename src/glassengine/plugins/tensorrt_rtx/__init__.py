"""Back-end "tensorrt_rtx": an ONNX graph compiled by TensorRT for RTX, its network and its plan."""

from glassengine.plugins.tensorrt_rtx.backend import TensorRtRtxBackend

__all__ = ["TensorRtRtxBackend"]

"""Record what is no PyTorch module: sessions of ONNX Runtime, requests of OpenVINO, packages of AOTInductor."""

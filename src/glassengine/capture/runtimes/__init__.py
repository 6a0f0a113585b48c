"""Record other runtimes than PyTorch: sessions of ONNX Runtime, requests of OpenVINO, packages of AOTInductor."""

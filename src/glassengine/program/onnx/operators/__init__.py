"""Operations of a translated ONNX graph: functions, graphs within, and nodes that are run alone."""

"""OpenVINO's files of decoders, as OpenVINO GenAI runs them: a cache inside, and names of the traced modules."""

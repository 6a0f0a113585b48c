"""SGLang, by what its dumpers have written: names of modules that are vLLM's."""

"""One program as those of several ranks: where each tensor lies, what each rank computes, which layers a stage has."""

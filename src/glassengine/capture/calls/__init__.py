"""One call of a module: its name, the tensors that go in and come out, and which calls do not count as steps."""

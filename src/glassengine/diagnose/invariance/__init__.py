"""A model beside itself under one change that must not matter: calls, traces, causes."""

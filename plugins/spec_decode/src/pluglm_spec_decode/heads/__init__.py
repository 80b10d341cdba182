"""Draft heads: a few layers that go on from a target's hidden states. How they run, how they draft, how they learn."""

"""Generation engines behind `RolloutEngine`: transformers, vLLM, and servers that speak HTTP."""

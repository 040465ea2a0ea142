"""Move in from OpenAI: read an account, keep golden replies, create the same jobs here, and compare the models.

It runs on the customer's machine and uses no server code: both APIs are called through the `openai` client.
"""

OPENAI = "https://api.openai.com/v1"
NUMBERS = ("n_epochs", "batch_size", "learning_rate_multiplier", "beta")  # hyperparameters; only `dpo` has `beta`

"""Moving in from OpenAI: what an account there holds, golden replies, the same jobs here, and a comparison.

Runs on the customer's machine and knows nothing of the server: both APIs are reached through the `openai` client.
"""

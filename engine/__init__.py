"""The decode engine that embeds the store."""

"""From prompts to scored groups: requests, seeds, filters, carried-over samples, evaluation."""

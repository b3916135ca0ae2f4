"""From the symptom to the operations that made it."""

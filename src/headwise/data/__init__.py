"""What models read: text as token streams, and tasks with known answers."""

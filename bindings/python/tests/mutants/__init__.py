"""Small broken attentions that the auditor must catch and name, and the sound ones they were broken from."""

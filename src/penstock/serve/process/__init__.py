"""The plane at work: the loop that serves, the process around it, and what watches over both."""

"""A proxy before a server of language models that notes what a simulator needs of its traffic, and no text.

Of each completion are kept: when it came, when its first token came and when it ended, how, how many tokens it had,
and hashes of its prompt and answer block by block, chained, so that equal beginnings have equal hashes. Not kept are
text, token ids, headers and keys, addresses, users, queries and what errors said.

The hashes are keyed with 32 random bytes, the salt. It is made anew at each start and kept in memory only, so that who
gets the file cannot even check a guess of a whole prompt. Three things remain possible. Times and sizes are in the
file, and which prompts begin alike. Who can send requests through the running proxy *and* read its file can compare
the hashes of a guess. And where the salt is kept in a file of its own, for runs that are to be compared, who has both
files can test guesses.
"""

-- Adds requests to the log, which keeps about so many of the last ones.
-- KEYS[1]: the stream. ARGV[1]: how many are kept; then a request's id and its document, again and again.
for i = 2, #ARGV, 2 do
  redis.call("XADD", KEYS[1], "MAXLEN", "~", ARGV[1], "*", "id", ARGV[i], "document", ARGV[i + 1])
end
return (#ARGV - 1) / 2

-- Adds to counts of one hash, and says how long it is kept.
-- KEYS[1]: the hash. ARGV[1]: for how many seconds from now; then a field and a whole number, again and again.
for i = 2, #ARGV, 2 do
  redis.call("HINCRBY", KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call("EXPIRE", KEYS[1], ARGV[1])
return (#ARGV - 1) / 2

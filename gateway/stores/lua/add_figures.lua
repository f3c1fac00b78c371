-- Adds to the counts of a hash, each field a JSON object of whole numbers, and says how long it is kept.
-- KEYS[1]: the hash. ARGV[1]: for how many seconds from now; then a field and what is added to it, again and again.
for i = 2, #ARGV, 2 do
  local counts = ARGV[i + 1]
  local known = redis.call("HGET", KEYS[1], ARGV[i])
  if known then
    local sums = cjson.decode(known)
    for name, count in pairs(cjson.decode(counts)) do
      sums[name] = (sums[name] or 0) + count
    end
    counts = cjson.encode(sums)
  end
  redis.call("HSET", KEYS[1], ARGV[i], counts)
end
redis.call("EXPIRE", KEYS[1], ARGV[1])
return (#ARGV - 1) / 2

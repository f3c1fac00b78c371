-- Writes one key in the place of the text that it was made from, and tells the workers; or changes nothing.
--
-- KEYS[1] hash id -> the key's JSON; KEYS[2] sorted set of `<when it was made>:<id>`; KEYS[3] the keys' revision
-- ARGV    id, the text that is there ('' = none), the new text ('' = delete it), its member in KEYS[2], the new
--         revision, the channel, how many keys there may be
-- Returns 1 when it is as wanted, 0 when another text is there, -1 when there are too many keys

local there = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if there == '' then
  redis.call('HDEL', KEYS[1], ARGV[1]) -- an empty text is no key
end

-- A client whose connection broke after the write sends it again: that is not a conflict.
if there == ARGV[3] then
  return 1
end
if there ~= ARGV[2] then
  return 0
end

if ARGV[3] == '' then
  redis.call('ZREM', KEYS[2], ARGV[4])
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  if there == '' and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[7]) then
    return -1
  end
  redis.call('ZADD', KEYS[2], 0, ARGV[4])
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end

local before = redis.pcall('GET', KEYS[3])
if type(before) ~= 'string' then
  before = '' -- none, or something that is no text: workers read all keys anew
end
redis.call('SET', KEYS[3], ARGV[5])
redis.call('PUBLISH', ARGV[6], cjson.encode({ARGV[1], before, ARGV[5]}))
return 1

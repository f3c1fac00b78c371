-- Adds what a worker has counted to a day's books, once, however often it is sent.
--
-- KEYS[1] the day's books: a hash of counts
-- KEYS[2] how far each worker's counts are booked: a hash of the number of its last flush, by worker
-- ARGV    worker, number of the flush, how long the day is kept in seconds, then field and increment in turn
-- Returns {1, how many fields would not take their increment}, or {0, 0} when this flush was booked before
--
-- A worker sends its flushes one after the other and repeats one until it has an answer, so its last number says all.
-- Increments go to Redis as they came, as text: HINCRBY counts in 64 bits, Lua's numbers only in 53.

local worker, number = ARGV[1], tonumber(ARGV[2])
local booked = tonumber(redis.call('HGET', KEYS[2], worker) or '') or 0
if booked >= number then
  return {0, 0}
end
redis.call('HSET', KEYS[2], worker, ARGV[2])

local refused = 0
for i = 4, #ARGV, 2 do
  -- A count that cannot grow any more (2^63) must not keep all others out of the books.
  local reply = redis.pcall('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
  if type(reply) == 'table' and reply.err then
    refused = refused + 1
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return {1, refused}

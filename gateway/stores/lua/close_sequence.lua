-- Marks the pin of a sequence as lost, or takes it away; nothing where the sequence lives elsewhere by now:
-- gateway/core/sequences.py::Pins.lose and Pins.end. The number stays its owner's until its time has passed.
--
-- KEYS[1] the pin (see find_sequence.lua)
-- ARGV    the instant in whole microseconds ('' = Redis's own clock), place, number, 'lost' or 'end'
-- Returns 1 where something was done

local now
if ARGV[1] == '' then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
else
  now = tonumber(ARGV[1])
end

local pin = redis.call('HMGET', KEYS[1], 'place', 'number', 'until')
local kept_until = tonumber(pin[3] or '')
if not kept_until or kept_until <= now or pin[1] ~= ARGV[2] or pin[2] ~= ARGV[3] then
  return 0
end
if ARGV[4] == 'lost' then
  redis.call('HSET', KEYS[1], 'lost', '1')
else
  redis.call('DEL', KEYS[1])
end
return 1

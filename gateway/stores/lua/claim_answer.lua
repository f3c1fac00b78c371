-- A kept answer, or the claim of its slot: gateway/ports.py::Answers.claim, on Redis's own clock.
--
-- KEYS[1] the kept answer: a hash of fingerprint, answer, at (when it was kept, ms)
-- KEYS[2] the claim: the string "<by> <fingerprint>"
-- ARGV    by, fingerprint, lease (ms), the greatest age (ms; '' = any)
-- Returns {state}, or {'kept', answer, age (ms), left (ms)}

local kept = redis.call('HMGET', KEYS[1], 'fingerprint', 'at')
if kept[1] then
  if kept[1] ~= ARGV[2] then
    return {'other'}
  end
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local age = math.max(0, now - tonumber(kept[2]))
  if ARGV[4] == '' or age <= tonumber(ARGV[4]) then
    return {'kept', redis.call('HGET', KEYS[1], 'answer'), age, redis.call('PTTL', KEYS[1])}
  end
end

local own = ARGV[1] .. ' ' .. ARGV[2]
local claim = redis.call('GET', KEYS[2])
if claim and claim ~= own then
  return {string.match(claim, ' (.*)$') == ARGV[2] and 'busy' or 'other'}
end
redis.call('SET', KEYS[2], own, 'PX', ARGV[3])
return {'fresh'}

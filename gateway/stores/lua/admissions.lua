-- Steps of one owner's admissions, one after another: gateway/core/admissions.py::Book inside Redis. A test with random
-- histories proves the two equal. All times are whole microseconds.
--
-- KEYS[1..2] `..open` (zset: id -> end of its lease) and `..held` (hash: id -> JSON of what it holds). All else that is
--            touched lies under the same hash tag: those names begin like KEYS[1].
-- ARGV[1]    MessagePack of one list of words, as a client packs each argument by itself, and not cheaply:
--            1    '' = Redis's own clock, so that all gateways agree; tests give the instant here
--            2    how long a lease lasts
--            3..  the steps:
--                 settle, id, n, then n amounts that were used up in the stead of what it holds
--                 renew, n, then n ids; they stand as 0 gone, 1 held, 2 held and first
--                 admit, id, n, bound of the queue ('' = no queue), then n takes: form, key, cost, bound, is held
--                 (true or false), and for `spent` three ends of periods; then the queue, where there is one
-- Returns    now, the ids whose turn has come, then one list for each `renew` and each `admit`; of `admit`: admitted,
--            ticket, ahead, is the queue full, then three for each take: passed, value, end of its period
--
-- Numbers are doubles, exact below 2^53 (now is near 2^51). Lua's own number-to-string keeps 14 digits only: a number
-- becomes text through text() and never through '..' or tostring().

local SWEPT_AT_ONCE = 16
local SWEPT_BY_RENEWAL = 256
local DEBT_WINDOWS = 2
local TWO_HOURS_MS = 7200000
local DAY_MS = 86400000

local function text(number)
  return string.format('%.0f', number)
end

local words = cmsgpack.unpack(ARGV[1])
local now = tonumber(words[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local lease = words[2]

local open, held = KEYS[1], KEYS[2]
local root = string.sub(open, 1, -5)
local answer = { now, {} }
local next_word = 3
local is_swept = false

local function word()
  next_word = next_word + 1
  return words[next_word - 1]
end

-- --- counters ---

local function set_rate(key, tat)
  -- A counter whose tat has passed says the same as no counter: it lives exactly so long.
  if tat > now then
    redis.call('SET', key, text(tat), 'PX', text(math.ceil((tat - now) / 1000)))
  else
    redis.call('DEL', key)
  end
end

local function set_spent(key, spent, ends)
  if spent > 0 then
    redis.call('HSET', key, 'spent', text(spent), 'until', text(ends))
    redis.call('PEXPIRE', key, text(math.ceil((ends - now) / 1000) + DAY_MS))
  else
    redis.call('DEL', key)
  end
end

local function spent_of(key)
  local kept = redis.call('HMGET', key, 'spent', 'until')
  return tonumber(kept[1] or ''), tonumber(kept[2] or '')
end

local function put_right(name, cost, bound, ends, used)
  local key = root .. name
  local form = string.match(name, '^%l+')
  if form == 'rate' then
    local tat = math.max(now, tonumber(redis.call('GET', key) or '') or now) + used - cost
    set_rate(key, math.min(tat, now + DEBT_WINDOWS * bound))
  elseif form == 'places' then
    local places = (tonumber(redis.call('GET', key) or '') or 0) - cost
    if places > 0 then
      redis.call('SET', key, text(places), 'KEEPTTL')
    else
      redis.call('DEL', key)
    end
  else
    local spent, counts_until = spent_of(key)
    if not spent or counts_until == ends then
      set_spent(key, (spent or 0) + used - cost, ends)
    end
  end
end

-- --- leaving ---

local function first_of(line)
  return redis.call('ZRANGE', line, 0, 0)[1]
end

-- Give back what `id` holds; the names of those that come next are added to `turns`.
local function give_back(id, used, turns)
  redis.call('ZREM', open, id)
  local kept = redis.call('HGET', held, id)
  if not kept then
    return
  end
  redis.call('HDEL', held, id)
  local what = cjson.decode(kept)
  for i = 2, #what, 4 do
    put_right(what[i], tonumber(what[i + 1]), tonumber(what[i + 2]), tonumber(what[i + 3]), used[(i + 2) / 4] or 0)
  end
  if what[1] ~= '' then
    local line = root .. 'queue:' .. what[1]
    local was_first = first_of(line) == id
    redis.call('ZREM', line, id)
    turns[#turns + 1] = was_first and first_of(line) or nil
  end
end

-- Tell the workers of those whose turn has come, unless they have left meanwhile too.
local function wake(turns)
  for _, id in ipairs(turns) do
    if redis.call('HEXISTS', held, id) == 1 then
      local prefix, worker = string.match(root, '^(.*)adm:{[^{}]*}:$'), string.match(id, '^(.*):')
      redis.call('PUBLISH', prefix .. 'turn:' .. (worker or ''), id)
      table.insert(answer[2], id)
    end
  end
end

-- Give back what leases hold that have run out, at most so many.
local function sweep(at_once, turns)
  if is_swept then
    return
  end
  local late = redis.call('ZRANGEBYSCORE', open, '-inf', text(now), 'LIMIT', 0, at_once)
  for _, id in ipairs(late) do
    give_back(id, {}, turns)
  end
  is_swept = #late < at_once
end

-- --- the steps ---

local function settle()
  local id, used, turns = word(), {}, {}
  for i = 1, word() do
    used[i] = word()
  end
  give_back(id, used, turns)
  wake(turns)
end

local function expire(key, ms)
  redis.call('PEXPIRE', key, ms)
end

-- What it holds lives on as long as it is renewed.
local function keep(id)
  local what = cjson.decode(redis.call('HGET', held, id) or '[""]')
  redis.call('ZADD', open, text(now + lease), id)
  for i = 2, #what, 4 do
    if string.sub(what[i], 1, 7) == 'places:' then
      expire(root .. what[i], TWO_HOURS_MS)
    end
  end
  if what[1] ~= '' then
    expire(root .. 'queue:' .. what[1], TWO_HOURS_MS)
    expire(root .. 'number:' .. what[1], DAY_MS)
  end
  return what[1]
end

local function renew()
  local ids, queues, turns, standings = {}, {}, {}, {}
  for i = 1, word() do
    ids[i] = word()
    if redis.call('ZSCORE', open, ids[i]) then
      queues[ids[i]] = keep(ids[i])
    end
  end
  expire(open, TWO_HOURS_MS)
  expire(held, TWO_HOURS_MS)
  sweep(SWEPT_BY_RENEWAL, turns)
  wake(turns)
  for i, id in ipairs(ids) do
    local queue = queues[id]
    standings[i] = not queue and 0 or queue ~= '' and first_of(root .. 'queue:' .. queue) == id and 2 or 1
  end
  return standings
end

-- What the counter of a take says before it.
local function stored(take)
  if take.form == 'rate' then
    local tat, most = tonumber(redis.call('GET', take.key) or '') or now, now + DEBT_WINDOWS * take.bound
    if tat > most then
      set_rate(take.key, most)
      tat = most
    end
    return math.max(now, tat)
  elseif take.form == 'places' then
    return tonumber(redis.call('GET', take.key) or '') or 0
  end
  local spent, counts_until = spent_of(take.key)
  return spent and counts_until == take.ends and spent or 0
end

local function take_of()
  local form = word()
  local take = { form = form, key = root .. form .. ':' .. word(), cost = word(), bound = word(), is_held = word() }
  take.ends = 0
  if take.form == 'spent' then
    local ends = { word(), word(), word() }
    take.ends = ends[1] > now and ends[1] or ends[2] > now and ends[2] or ends[3]
  end
  return take
end

local function store(take, value)
  if take.form == 'rate' then
    set_rate(take.key, value)
  elseif take.form == 'spent' then
    set_spent(take.key, value, take.ends)
  elseif value > 0 then
    redis.call('SET', take.key, text(value), 'PX', TWO_HOURS_MS)
  end
end

-- Remember what an admission holds, so that whoever comes can give it back.
local function hold(id, takes, queue)
  local what = { queue and string.sub(queue, #root + 7) or '' }
  for _, take in ipairs(takes) do
    if take.is_held then
      for _, one in ipairs({ string.sub(take.key, #root + 1), text(take.cost), text(take.bound), text(take.ends) }) do
        what[#what + 1] = one
      end
    end
  end
  if #what > 1 or queue then
    redis.call('HSET', held, id, cjson.encode(what))
    expire(held, TWO_HOURS_MS)
    redis.call('ZADD', open, text(now + lease), id)
    expire(open, TWO_HOURS_MS)
  end
end

-- One that is under way with this id already keeps what it has: its ask was repeated, as its answer was lost.
local function again(id, n, has_queue)
  local said = { 1, 0, 0, 0 }
  for i = 1, n do
    local take = take_of()
    said[3 * i + 2], said[3 * i + 3], said[3 * i + 4] = 1, stored(take), take.ends
  end
  if has_queue then
    local queue = root .. 'queue:' .. word()
    said[2] = tonumber(redis.call('ZSCORE', queue, id) or '') or 0
    said[3] = redis.call('ZRANK', queue, id) or 0
  end
  keep(id)
  return said
end

local function admit()
  local id, n, queue_bound = word(), word(), tonumber(word())
  local turns, takes, after, said = {}, {}, {}, { 1, 0, 0, 0 }
  sweep(SWEPT_AT_ONCE, turns)
  wake(turns)
  if redis.call('HEXISTS', held, id) == 1 then
    return again(id, n, queue_bound)
  end
  for i = 1, n do
    local take = take_of()
    local value = after[take.key] or stored(take)
    local passes = take.cost == 0 or value + take.cost <= take.bound + (take.form == 'rate' and now or 0)
    value = passes and value + take.cost or value
    takes[i], after[take.key], said[1] = take, value, passes and said[1] or 0
    said[3 * i + 2], said[3 * i + 3], said[3 * i + 4] = passes and 1 or 0, value, take.ends
  end
  local name = queue_bound and word()
  local queue, number = name and root .. 'queue:' .. name, name and root .. 'number:' .. name
  if queue then
    said[3] = redis.call('ZCARD', queue)
    if said[3] >= queue_bound then
      said[1], said[4] = 0, 1
    end
  end
  if said[1] == 0 then
    said[3] = 0
    return said
  end
  for _, take in ipairs(takes) do
    store(take, after[take.key])
  end
  hold(id, takes, queue)
  if queue then
    said[2] = redis.call('INCR', number)
    expire(number, DAY_MS)
    redis.call('ZADD', queue, said[2], id)
    expire(queue, TWO_HOURS_MS)
  end
  return said
end

while next_word <= #words do
  local step = word()
  if step == 'settle' then
    settle()
  elseif step == 'renew' then
    table.insert(answer, renew())
  else
    table.insert(answer, admit())
  end
end

return answer

-- Counts anew, from the requests that have a lease, what workers and states are credited with.
local workers, states = {}, {}

local function add(worker, term, field, number)
  local fields = workers[worker]
  if fields and fields.term == term then fields[field] = fields[field] + number end
end

for _, id in ipairs(worker_ids()) do
  local term = redis.call('HGET', key('node:', id), 'term')
  if term then workers[id] = {term = term, pending = 0, prefills = 0, reserved = 0, decodes = 0, answers = 0} end
end
for _, id in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do
  local request = read(key('req:', id))
  if not request.state or ENDS[request.state] then
    redis.call('ZREM', key('leases'), id)
  else
    states[request.state] = (states[request.state] or 0) + 1
    if request.prefill_held == '1' then
      add(request.prefill, request.prefill_term, 'pending', request.prefill_tokens)
      add(request.prefill, request.prefill_term, 'prefills', 1)
    end
    if request.to then
      add(request.to, request.to_term, 'reserved', request.to_tokens)
      add(request.to, request.to_term, 'decodes', 1)
    end
    if request.decode_held == '1' then
      add(request.decode, request.decode_term, 'reserved', request.decode_tokens)
      add(request.decode, request.decode_term, 'decodes', 1)
      if request.prefill_held ~= '1' then add(request.decode, request.decode_term, 'answers', 1) end
    end
  end
end
for id, counts in pairs(workers) do
  redis.call('HSET', key('node:', id), 'pending', counts.pending, 'prefills', counts.prefills,
    'reserved', counts.reserved, 'decodes', counts.decodes, 'answers', counts.answers)
  touch(id)
end
local known = redis.call('HGETALL', key('states'))
for i = 1, #known, 2 do
  if not ENDS[known[i]] or tonumber(known[i + 1]) < 0 then redis.call('HDEL', key('states'), known[i]) end
end
for state, number in pairs(states) do redis.call('HSET', key('states'), state, number) end
redis.call('DEL', key('damaged'))
return 1
